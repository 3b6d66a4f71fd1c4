"""One training step over every axis of the mesh, with the same result as one process.

Phases of a step:

1. forward and backward   micro-batch after micro-batch: through the pipeline, or accumulated
2. reduce                 gradients become means over ("dp", "cp"), unless backward has done this
3. clip                   by one norm over all ranks
4. update                 AdamW on what this rank owns; ZeRO sends the result to the other ranks

Example, on 4 ranks::

    config = ParallelismConfig(dp=2, tp=2, zero_stage=1)
    mesh = make_mesh(dp=2, tp=2)
    torch.manual_seed(0)                                # the same model on every rank
    trainer = HybridTrainer(GPT(model_config), mesh, config, micro_batch=2, lr=1e-3)
    for tokens_BT, targets_BT in batches:               # of this dp rank; the same along pp, cp, tp
        loss = trainer.forward_backward(tokens_BT, targets_BT)   # the mean of all ranks' tokens
        trainer.clip_grad_norm(1.0)
        trainer.step()
    state = trainer.full_state_dict()                   # as of the unsplit GPT

**Which ranks average what.** dp ranks see different sequences and cp ranks see different tokens, so
gradients are averaged over both. Each rank's loss is its sum over tokens, times R / (tokens of all
R ranks and all micro-batches). The average is then the mean over all tokens, even if targets of
-100 make the numbers of tokens unequal. tp ranks do not average, because the operators f and g have
already summed. pp ranks hold different parameters, except a tied embedding: its two copies exchange
their gradients.

**ZeRO** shards what each rank holds after tp and pp, over ("dp", "cp"):

    zero_stage        gradients                               with pp > 1
    0 (replicated)    DDP: all-reduce during backward         all-reduce after the pipeline
    1                 reduce-scatter before the update        the same
    2                 reduce-scatter during backward          refused: once per micro-batch
    3                 the same, and parameters are gathered   refused: once per micro-batch

Papers: Megatron-LM (arXiv 2104.04473), ZeRO (arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minidist.cost.parallelism import ParallelismConfig
from minidist.cost.transformer import Transformer
from minidist.device import by_dtype_and_device
from minidist.mesh import Mesh
from minidist.parallel.context import shard_sequence
from minidist.parallel.data import BucketedDDP, average_gradients_flat
from minidist.parallel.hybrid.stage import HybridStage, build_stages, output_specs
from minidist.parallel.hybrid.state import HybridState
from minidist.parallel.pipeline import PipelineExecutor, interleaved
from minidist.parallel.tensor import vocab_parallel_cross_entropy
from minidist.parallel.zero import ShardedOptimizer, Zero2Optimizer, Zero3
from minidist.precision import MixedPrecisionPolicy
from minidist.precision.clip import own_norms


class HybridTrainer(HybridState):
    """A GPT over a mesh, and the AdamW that trains it.

    A `GradScaler` can use it as an optimiser: `scaler.unscale_(trainer)`, `scaler.step(trainer)`.

    Args:
        model: a `minidist.model.GPT` with the same weights on all ranks; not changed.
        mesh: made with the degrees of `config`.
        micro_batch: number of sequences that pass through the model at once.
        num_micro_batches: number of micro-batches in one step; a step's batch has
            micro_batch * num_micro_batches sequences per dp rank.
        compute_dtype: bfloat16 or float16 for mixed precision. None means the parameters' dtype.
        bucket_bytes: gradients (and with ZeRO-1 and -2 parameters) travel in buckets of at most
            this size; a larger one travels alone.
        adamw: lr, betas, eps, weight_decay of torch.optim.AdamW.

    Dropout: seed the default generator after making the model and before this call. The seed must
    depend on the rank's coordinates on dp, pp and cp, but not on tp, because tp ranks hold the same
    activations.

    Raises:
        ValueError: sizes that do not divide, or ZeRO-2 or -3 with a pipeline. Raised on every rank
            before any communication; the message shows the arithmetic.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        config: ParallelismConfig,
        *,
        micro_batch: int = 1,
        num_micro_batches: int = 1,
        compute_dtype: torch.dtype | None = None,
        bucket_bytes: int = 25 << 20,
        **adamw: Any,
    ) -> None:
        # Validate.
        if mesh.sizes != {axis: getattr(config, axis) for axis in mesh.sizes}:
            raise ValueError(f"HybridTrainer: the mesh is {mesh.shape}, the configuration {config}")
        if config.replicas > 1:
            raise ValueError(
                f"HybridTrainer: shards go over all dp x cp ranks; {config.replicas} copies of "
                "them are a plan of minidist.cost only"
            )
        config.validate(
            world_size=mesh.world_size,
            model=self._sizes(model),
            global_batch=config.dp * micro_batch * num_micro_batches,
            micro_batch=micro_batch,
        )

        # Derive.
        self.mesh, self.config, self.model_config = mesh, config, model.config
        self.micro_batch, self.num_micro_batches = micro_batch, num_micro_batches
        self.group = mesh.group(("dp", "cp"))  # ranks that hold equal parameters
        self.device = model.head.weight.device

        # Build: cut the model, then let the ranks of self.group share it.
        self.stages = self._build_stages(model, compute_dtype)
        self._module: nn.Module = self.stages[0]  # the module to call if there is no pipeline
        self._zero3: Zero3 | None = None
        self._share(bucket_bytes, compute_dtype, adamw)
        self.pipeline: PipelineExecutor | None = None
        if config.pp > 1:
            dtype = model.head.weight.dtype
            self.pipeline = PipelineExecutor(
                self.stages,
                interleaved(config.pp, num_micro_batches, config.virtual_stages),
                self._loss,
                count=lambda _: 1,  # `_loss` has divided by the number of all tokens
                group=mesh.group("pp"),
                specs=output_specs(config, model.config, micro_batch, dtype, compute_dtype),
            )
        super().__init__(self.stages, mesh, config, self.optimizers, self._zero3)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._scale = self._factor = 1.0
        self._reduced = True

    def _sizes(self, model: Any) -> Transformer:
        return Transformer.from_config(model.config)

    def _build_stages(self, model: Any, compute_dtype: torch.dtype | None) -> list[HybridStage]:
        return build_stages(model, self.mesh, self.config, compute_dtype=compute_dtype)

    def _share(self, bucket_bytes: int, compute_dtype: torch.dtype | None, adamw: Any) -> None:
        """Data parallelism or ZeRO over `group`, and the optimiser that goes with it."""
        stage = self.stages[0]
        params = [p for each in self.stages for p in each.parameters()]
        options = {"group": self.group, "bucket_bytes": bucket_bytes, **adamw}
        match self.config.zero_stage:
            case 0:
                if self.config.pp == 1 and self.config.shard_ranks > 1:
                    self._module = BucketedDDP(stage, group=self.group, bucket_bytes=bucket_bytes)
                optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, **adamw)
            case 1:
                optimizer = ShardedOptimizer(
                    params, torch.optim.AdamW, average_gradients=True, **options
                )
            case 2:
                optimizer = Zero2Optimizer(params, torch.optim.AdamW, **options)
            case _:
                # Parameters travel and compute in 16 bits; autocast would keep 16-bit copies.
                policy = MixedPrecisionPolicy(compute_dtype, torch.float32)
                self._zero3 = Zero3(
                    stage,
                    stage.blocks.values(),
                    self.group,
                    policy=None if compute_dtype is None else policy,
                )
                optimizer = torch.optim.AdamW(stage.parameters(), **adamw)
        self.optimizers = [optimizer]

    # 1. forward and backward --------------------------------------------------------------------

    def forward_backward(
        self, tokens_BT: Tensor, targets_BT: Tensor, *, scale: float = 1.0
    ) -> Tensor:
        """Clear the gradients, then compute those of one batch. Collective.

        Args:
            tokens_BT, targets_BT: whole sequences, int64; the batch of this rank's dp coordinate.
                Targets of -100 do not count.
            scale: loss scale, `scaler.get_scale()`; it multiplies the gradients.

        Returns:
            The mean loss per token over all ranks, on every rank: a float64 scalar, not scaled.

        Raises:
            ValueError: the batch does not have micro_batch * num_micro_batches sequences.
        """
        self.zero_grad()
        self._reduced = False
        num_tokens, tokens_BT, targets_BT = self._prepare(tokens_BT, targets_BT)
        self._scale = scale
        self._factor = scale * self.config.shard_ranks / max(num_tokens, 1)
        if self.pipeline is not None:
            self._factor *= self.num_micro_batches  # the executor takes the mean over them
            self.pipeline.step(tokens_BT, targets_BT)
        else:
            # DDP sends gradients in the last backward. ZeRO-2 and -3 send them in every backward,
            # because they must not keep whole gradients.
            no_sync = getattr(self._module, "no_sync", nullcontext)
            for i, (tokens, targets) in enumerate(self._micro_batches(tokens_BT, targets_BT)):
                with nullcontext() if i == self.num_micro_batches - 1 else no_sync():
                    self._loss(self._module(tokens), targets).backward()
        return self._sum_once(self._loss_sum, self._has_loss) / max(num_tokens, 1)

    @torch.no_grad()
    def evaluate(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[float, float]:
        """Sum of the losses of all tokens of all ranks, and the number of tokens. Collective.

        Every dp rank must call it equally often, with batches of the same size as in training. A
        rank that has no more sequences fills the batch with targets of -100, so that every sequence
        counts once.
        """
        num_tokens, tokens_BT, targets_BT = self._prepare(tokens_BT, targets_BT)
        modes = [stage.training for stage in self.stages]
        for stage in self.stages:
            stage.eval()
        if self.pipeline is not None:
            self.pipeline.evaluate(tokens_BT, targets_BT)
        else:
            for tokens, targets in self._micro_batches(tokens_BT, targets_BT):
                self._loss(self._module(tokens), targets)
        for stage, mode in zip(self.stages, modes, strict=True):
            stage.train(mode)
        return self._sum_once(self._loss_sum, self._has_loss).item(), num_tokens

    def _prepare(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[float, Tensor, Tensor]:
        """Number of tokens of all ranks, and this rank's part of the sequences."""
        expected = (self.micro_batch * self.num_micro_batches, self.model_config.context)
        if tuple(tokens_BT.shape) != expected or targets_BT.shape != tokens_BT.shape:
            raise ValueError(
                f"[rank {self.mesh.rank}] HybridTrainer: {self.num_micro_batches} micro-batches x "
                f"{self.micro_batch} sequences of {expected[1]} tokens: expected tokens and "
                f"targets of shape {expected}, got {tuple(tokens_BT.shape)} and "
                f"{tuple(targets_BT.shape)}"
            )
        cp = self.mesh.group("cp")
        tokens_BT, targets_BT = (
            shard_sequence(x.to(self.device), group=cp) if self.config.cp > 1 else x.to(self.device)
            for x in (tokens_BT, targets_BT)
        )
        count = (targets_BT != -100).sum().double()
        dist.all_reduce(count, group=self.group)
        self._loss_sum.zero_()
        return count.item(), tokens_BT, targets_BT

    def _micro_batches(self, *batch_BT: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(x.split(self.micro_batch) for x in batch_BT), strict=True)

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """The scaled loss for backward. Also adds the unscaled loss to the sum for the report."""
        total = vocab_parallel_cross_entropy(
            logits_BTV,
            targets_BT,
            group=self.mesh.group("tp"),
            vocab_size=self.model_config.vocab_size,
            reduction="sum",
        )
        self._loss_sum += total.detach()
        return total * self._factor

    # 2. reduce ----------------------------------------------------------------------------------

    def prepare_gradients(self) -> None:
        """Make gradients means over ranks if backward has not. A second call does nothing."""
        if not self._reduced:
            self._reduced = True
            sharded = [o for o in self.optimizers if isinstance(o, ShardedOptimizer)]
            for optimizer in sharded:
                optimizer.reduce_gradients()
            if not sharded and self.pipeline is not None:
                average_gradients_flat(nn.ModuleList(self.stages), self.group)

    # 3. clip ------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float = float("inf")) -> Tensor:
        """Scale the gradients so that the norm of all of them is at most `max_norm`. Collective.

        Every element of the model counts on exactly one rank, and one all-reduce of one number adds
        the squares of all ranks. Clipping by each rank's own norm would scale every shard
        differently.

        Returns:
            The norm before clipping, a float64 scalar, the same on every rank.
        """
        self.prepare_gradients()
        grads = [h.tensor.grad for h in self.held if h.tensor.grad is not None]
        own = [h.tensor.grad for h in self._counting if h.tensor.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        # A few kernels for all gradients together. With a few kernels per gradient, a GPU would
        # spend more time on launches than on computation.
        if own:
            square += torch.stack(own_norms(own, dtype=torch.float64)).square().sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for alike in by_dtype_and_device(grads):
            torch._foreach_mul_(alike, factor.to(alike[0]))
        return norm

    # 4. update ----------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The tensors that this rank updates, with gradients in `.grad`. For a GradScaler."""
        return [{"params": [held.tensor for held in self.held]}]

    def step(self) -> None:
        """Update the parameters. Collective."""
        self.prepare_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        self.num_updates += 1

    def zero_grad(self) -> None:
        """Clear all gradients, including those of a skipped step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self._zero3 is not None:
            self._zero3.discard_gradients()

    def set_lr(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def metrics(self) -> dict[str, float]:
        """What a log should know of the last step besides its loss; the same on every rank."""
        return {}

    @property
    def _has_loss(self) -> bool:
        """Whether this rank's sum of losses counts: only on the last stage, and only on tp 0."""
        at = self.mesh.coordinate
        return at("pp") == self.config.pp - 1 and at("tp") == 0

    def _sum_once(self, value: Tensor, counts: bool) -> Tensor:
        total = value.clone() if counts else torch.zeros_like(value)
        dist.all_reduce(total)
        return total
