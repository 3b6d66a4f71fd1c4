"""A trainer of mixtures of experts: data parallelism for the tokens, expert parallelism inside it.

Every rank has its own sequences, as in data parallelism. Groups of `ep` neighbouring ranks hold all
experts once; whatever is not an expert is on every rank. So one step differs in four places:

    gradients   of experts: the sum over their copies; of the rest: over all ranks; both divided by
                the number of all ranks, since the loss is the mean over all of them
    norm        each expert counts once, on the first rank that holds it; the rest on rank 0
    ZeRO-1      two optimisers: experts are sharded over their copies, the rest over all ranks
    balance     after the update: a bias on the choice, from the choices of all ranks in this step

Example, on 4 ranks::

    config = ParallelismConfig(dp=4, ep=2)
    torch.manual_seed(0)                                # the same model on every rank
    model = GPT(model_config)
    use_experts(model, moe_config, make_expert_mesh(2))
    trainer = ExpertTrainer(model, make_mesh(dp=4), config, micro_batch=2, lr=1e-3)

and then as with a `HybridTrainer`. Gradients travel after backward, in one message for the experts
and one for the rest; none travels during backward.

Papers: DeepSpeed-MoE (arXiv 2201.05596) for experts beside data parallelism, auxiliary-loss-free
balancing (arXiv 2408.15664).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.cost.parallelism import ParallelismConfig
from minidist.cost.transformer import Transformer
from minidist.mesh import Mesh
from minidist.parallel.expert import (
    ExpertMesh,
    MoE,
    MoEConfig,
    average_gradients,
    balance_loss,
    imbalance,
    update_bias,
)
from minidist.parallel.expert.layer import Experts
from minidist.parallel.hybrid.parts import Held, Part
from minidist.parallel.hybrid.stage import HybridStage, check_shared
from minidist.parallel.hybrid.trainer import HybridTrainer
from minidist.parallel.zero import ShardedOptimizer
from minidist.unsupported import Unsupported

AXES = Unsupported(
    "ExpertTrainer, minidist.train --num-experts",
    "pipeline, context and tensor parallelism beside experts",
    instead="leave pp, cp and tp at 1: dp takes all ranks, and ep of them share the experts",
)
SHARDS = Unsupported(
    "ExpertTrainer, minidist.train --num-experts",
    "ZeRO-2 and ZeRO-3 of experts",
    instead="use ZeRO-1, and a larger ep, which divides the experts' parameters and gradients",
)


def refuse(config: ParallelismConfig) -> None:
    """Raise ValueError if `config` has what an `ExpertTrainer` cannot do. No communication."""
    axes = [f"{name} {size}" for name in ("pp", "cp", "tp") if (size := getattr(config, name)) > 1]
    if axes:
        raise AXES.error(f"got {' x '.join(axes)}", where="experts")
    if config.zero_stage > 1:
        raise SHARDS.error(f"got ZeRO-{config.zero_stage}", where="experts")


def sizes_with_experts(model_config: Any, experts: MoEConfig) -> Transformer:
    """The model's sizes, for `minidist.cost`: parameters, and FLOPs of the experts visited."""
    return replace(
        Transformer.from_config(model_config),
        num_experts=experts.num_experts,
        experts_per_token=experts.top_k,
        expert_width=experts.expert_width,
        shared_experts=experts.shared_experts,
    )


class ExpertTrainer(HybridTrainer):
    """A GPT with experts over all ranks, and the AdamW that trains it.

    Args:
        model: a GPT after `use_experts(model, ..., make_expert_mesh(config.ep))`, with the same
            weights on all ranks. It is trained in place.
        mesh, config: dp takes all ranks; `config.ep` of them hold all experts once.
        balance_weight: factor of the auxiliary loss, the mean over micro-batches of the sum over
            layers of `balance_loss`. It counts the choices that all ranks make at the same time, so
            a run with this loss depends on how a batch is cut into micro-batches.
        bias_speed: how far a step moves the bias of each expert; 0 moves none.
        options: those of `HybridTrainer`.

    Raises:
        ValueError: an axis that is not dp, ZeRO-2 or -3, no experts, or sizes that do not divide.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        config: ParallelismConfig,
        *,
        balance_weight: float = 0.0,
        bias_speed: float = 0.001,
        **options: Any,
    ) -> None:
        # Validate.
        refuse(config)
        self.layers = [module for module in model.modules() if isinstance(module, MoE)]
        meshes = [layer.mesh for layer in self.layers]
        if not meshes or any(each is None or each.ep != config.ep for each in meshes):
            raise ValueError(
                f"ExpertTrainer: expected a model after use_experts(..., make_expert_mesh("
                f"{config.ep})), got {len(meshes)} layers of experts, with ep "
                f"{[each and each.ep for each in meshes]}"
            )
        # Derive.
        assert meshes[0] is not None
        self.expert_mesh: ExpertMesh = meshes[0]
        self.balance_weight, self.bias_speed = balance_weight, bias_speed
        self._experts = {
            f"{prefix}.{name}": parameter
            for prefix, module in model.named_modules()
            if isinstance(module, Experts)
            for name, parameter in module.named_parameters()
        }
        # One row per layer: choices of each expert, choices dropped, auxiliary loss.
        columns = self.layers[0].config.num_experts + 2
        shape = (len(self.layers), columns)
        self._tally = torch.zeros(shape, dtype=torch.float64, device=model.head.weight.device)
        super().__init__(model, mesh, config, **options)

    # What the ranks hold ------------------------------------------------------------------------

    def _sizes(self, model: Any) -> Transformer:
        return sizes_with_experts(model.config, self.layers[0].config)

    def _build_stages(self, model: Any, compute_dtype: torch.dtype | None) -> list[HybridStage]:
        check_shared(model)
        return [HybridStage(model, self.mesh, 0, 1, compute_dtype)]

    def _share(self, bucket_bytes: int, compute_dtype: torch.dtype | None, adamw: Any) -> None:
        experts = list(self._experts.values())
        own = set(experts)
        rest = [p for p in self.stages[0].parameters() if p not in own]
        if self.config.zero_stage == 0:
            self.optimizers = [torch.optim.AdamW([*rest, *experts], **adamw)]
            return
        self.optimizers = [
            ShardedOptimizer(
                params,
                torch.optim.AdamW,
                group,
                average_gradients=True,
                bucket_bytes=bucket_bytes,
                **adamw,
            )
            for params, group in ((rest, self.group), (experts, self.expert_mesh.edp_group))
        ]

    def _splits(self, stage: HybridStage) -> dict[str, tuple[int, int]]:
        return {name: (0, self.layers[0].config.num_experts) for name in self._experts}

    @cached_property
    def _place(self) -> int:
        return self.expert_mesh.ep_rank

    @cached_property
    def _is_first_copy(self) -> bool:
        return dist.get_rank(self.expert_mesh.edp_group) == 0

    def counts(self, held: Held) -> bool:
        if self.config.zero_stage:
            return True  # one rank owns it
        return self._is_first_copy if held.split is not None else self.mesh.rank == 0

    def parameter_parts(self) -> list[tuple[str, Part]]:
        """(name, part) for all parameters in this rank's memory, and the routers' biases."""
        biases = [
            (name, Part(bias, tuple(bias.shape), (0,) * bias.dim()))
            for name, bias in self.stages[0].named_buffers()
        ]
        return super().parameter_parts() + biases

    # A step -------------------------------------------------------------------------------------

    def forward_backward(
        self, tokens_BT: Tensor, targets_BT: Tensor, *, scale: float = 1.0
    ) -> Tensor:
        """As `HybridTrainer.forward_backward`; the loss it returns is without the auxiliary one."""
        self._tally.zero_()
        loss = super().forward_backward(tokens_BT, targets_BT, scale=scale)
        dist.all_reduce(self._tally, group=self.group)
        return loss

    def _loss(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        total = super()._loss(logits_BTV, targets_BT)
        if not torch.is_grad_enabled():
            return total  # an evaluation: it neither counts nor has an auxiliary loss
        for row, layer in zip(self._tally, self.layers, strict=True):
            assert layer.routing is not None
            row[:-2] += layer.routing.load_E
            row[-2] += layer.num_dropped
            if self.balance_weight:
                penalty = balance_loss(layer.routing, self.group)
                row[-1] += penalty.detach()
                factor = self._scale * self.balance_weight / self.num_micro_batches
                total = total + factor * penalty
        return total

    def prepare_gradients(self) -> None:
        if self._reduced:
            return
        if self.config.zero_stage == 0:
            self._reduced = True
            average_gradients(self.stages[0], self.expert_mesh)
            return
        # The optimiser takes the mean over an expert's copies, and there are ep times more ranks.
        for parameter in self._experts.values():
            if parameter.grad is not None:
                parameter.grad /= self.expert_mesh.ep
        super().prepare_gradients()

    def step(self) -> None:
        """Update the parameters, then the routers' biases. Collective."""
        super().step()
        if self.bias_speed:
            for row, layer in zip(self._tally, self.layers, strict=True):
                update_bias(layer.router, row[:-2], speed=self.bias_speed)

    def metrics(self) -> dict[str, float]:
        """Of the last step, of all ranks.

        Returns:
            "imbalance": load of the fullest expert / mean load, of the layer where it is largest;
            "dropped": the share of all choices that found no room; with an auxiliary loss also
            "balance_loss": its mean over layers, without its factor.
        """
        choices_LE, dropped_L, penalty_L = (
            self._tally[:, :-2],
            self._tally[:, -2],
            self._tally[:, -1],
        )
        found = {
            "imbalance": max(imbalance(load_E) for load_E in choices_LE),
            "dropped": (dropped_L.sum() / choices_LE.sum()).item(),
        }
        if self.balance_weight:
            times = self.config.shard_ranks * self.num_micro_batches
            found["balance_loss"] = penalty_L.mean().item() / times
        return found
