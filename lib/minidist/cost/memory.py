"""Bytes per GPU: parameters, gradients, optimiser states, activations.

**Model states.** Mixed-precision Adam keeps 2 bytes of bf16 parameter, 2 of gradient, and in fp32
a master copy, a momentum and a variance: 2 + 2 + 12 = 16 bytes per parameter (Rajbhandari et al.,
arXiv 1910.02054). Texts often quote 12, which is only the optimiser's part. Plain fp32 Adam also
needs 16: mixed precision saves activations and time, not model states.

**ZeRO** over N ranks: stage 1 divides the 12 by N, stage 2 also the gradients, stage 3 everything.

**Activations** of one block, in bytes, s sequence, b micro-batch, h width, a heads, t tensor ranks
(Korthikanti et al., arXiv 2205.05198, table 2):

    no parallelism           s b h (34 + 5 a s/h)
    tensor parallel          s b h (10 + 24/t + 5 a s/(h t))
    + sequence parallel      s b h (34/t + 5 a s/(h t))
    selective recomputation  without the terms with 5 a s/h (as with FlashAttention)
    full recomputation       s b h 2

Example: GPT-3's model states, then the activations of one sequence on one GPU.

>>> round(MIXED_ADAM.total * 175e9 / 1e12, 1)  # TB
2.8
>>> from minidist.cost.transformer import GPT3_175B
>>> round(96 * activation_bytes_per_layer(model=GPT3_175B, micro_batch=1) / 1e9)  # GB
275
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from minidist.cost.parallelism import ParallelismConfig
from minidist.cost.transformer import Transformer

# ------------------------------------------------------------------------------------ model states


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes per parameter.

    Attributes:
        parameter: the copy that the forward pass uses.
        gradient: the gradient that backward writes and the ranks reduce.
        optimizer: all other state that is kept between steps: master copy, momenta.
    """

    parameter: float
    gradient: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameter + self.gradient + self.optimizer

    def per_rank(self, *, zero_stage: int, num_ranks: int) -> StateBytes:
        """Bytes that each of `num_ranks` data-parallel ranks holds per parameter of the model.

        >>> stage = lambda s: MIXED_ADAM.per_rank(zero_stage=s, num_ranks=64).total * 7.5
        >>> [round(stage(s), 1) for s in (0, 1, 2, 3)]  # GB for 7.5B parameters
        [120.0, 31.4, 16.6, 1.9]
        """
        if zero_stage not in (0, 1, 2, 3) or num_ranks < 1:
            raise ValueError(f"ZeRO stage is 0 to 3 on >= 1 ranks, got {zero_stage}, {num_ranks}")
        return StateBytes(
            parameter=self.parameter / (num_ranks if zero_stage >= 3 else 1),
            gradient=self.gradient / (num_ranks if zero_stage >= 2 else 1),
            optimizer=self.optimizer / (num_ranks if zero_stage >= 1 else 1),
        )


_STATES_PER_PARAMETER = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "adam8bit": 0.5}


def state_bytes(*, optimizer: str = "adam", precision: str = "bf16_mixed") -> StateBytes:
    """Bytes per parameter of an optimiser in a precision.

    Args:
        optimizer: sgd, momentum, adam, adamw, adam8bit (one byte per state).
        precision: "fp32"; "bf16_mixed" or "fp16_mixed" (16-bit parameters and gradients, fp32
            master copy and states); "bf16_fp32_grads" (Megatron: gradients kept in fp32);
            "fp16_fp32_grad_copy" (Megatron fp16: an additional fp32 gradient); "bf16" (everything
            in 16 bits, no master copy: small updates are lost).

    >>> [state_bytes(precision=p).total for p in ("fp32", "bf16_mixed", "bf16_fp32_grads",
    ...                                           "fp16_fp32_grad_copy", "bf16")]
    [16, 16, 18, 20, 8]
    >>> state_bytes(optimizer="momentum", precision="fp32").total
    12
    """
    if optimizer not in _STATES_PER_PARAMETER:
        raise ValueError(f"state_bytes: unknown optimizer {optimizer!r}")
    states = _STATES_PER_PARAMETER[optimizer]
    table = {  # parameter, gradient, extra copies (master, gradient), bytes per optimiser state
        "fp32": (4, 4, 0, 4),
        "bf16_mixed": (2, 2, 4, 4),
        "fp16_mixed": (2, 2, 4, 4),
        "bf16_fp32_grads": (2, 4, 4, 4),
        "fp16_fp32_grad_copy": (2, 2, 8, 4),
        "bf16": (2, 2, 0, 2),
    }
    if precision not in table:
        raise ValueError(f"state_bytes: unknown precision {precision!r}, known are {list(table)}")
    parameter, gradient, kept, per_state = table[precision]
    return StateBytes(parameter=parameter, gradient=gradient, optimizer=kept + states * per_state)


MIXED_ADAM = state_bytes()


# ------------------------------------------------------------------------------------- activations

RECOMPUTE = ("none", "selective", "full")


def activation_bytes_per_layer(
    *,
    model: Transformer,
    micro_batch: int,
    tp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    fused_attention: bool = False,
    dropout: bool = True,
    autocast: bool = False,
) -> float:
    """Bytes that one block keeps for backward on one GPU, with 16-bit activations.

    For a GPT with dropout this is table 2 of arXiv 2205.05198. The same way of counting covers
    other MLPs and grouped queries: an operation keeps its input, and a dropout keeps one byte per
    element for its mask. The terms, in units of s b h (the scores in units of s b h a s/h):

        whole on each rank with plain tensor parallelism: two norms and two block inputs 2+2+2+2,
            masks 1+1
        divided by tensor parallelism: q 2, k and v 4 (less with grouped queries), attention output
            2, MLP 2r before and 2r after GELU (r = inner width / h; SwiGLU keeps four such tensors)
        scores: softmax 2, and with dropout its mask 1 and its output 2

    Args:
        fused_attention: FlashAttention, which never stores the scores.
        autocast: as `torch.autocast` keeps them: the residual stream is fp32, so both norms' inputs
            have 2 bytes more, and q, k and v each cast the norm's output for themselves (4 more).
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute is one of {RECOMPUTE}, got {recompute!r}")
    sbh = model.context / cp * micro_batch * model.width
    if recompute == "full":
        return (4 if autocast else 2) * sbh
    ratio = model.mlp_width / model.width
    whole = 8 + (2 if dropout else 0) + (8 if autocast else 0)
    if model.num_experts:  # the visited experts' inner tensors, and the tokens sent and received
        dense = model.dense_layers / model.num_layers
        visited = model.experts_per_token + model.shared_experts
        ratio = dense * ratio + (1 - dense) * visited * model.expert_width / model.width
        routed = (1 - dense) * 4 * model.experts_per_token
    else:
        routed = 0.0
    cut = 4 + 4 * model.kv_width / model.width + (8 if model.gated_mlp else 4) * ratio + routed
    scores = (5 if dropout else 2) * model.num_heads * model.context / model.width
    if recompute == "selective" or fused_attention:
        scores = 0
    return sbh * (whole / (tp if sequence_parallel else 1) + (cut + scores) / tp)


def in_flight_layers(
    *,
    num_layers: int,
    pp: int,
    num_microbatches: int | None = None,
    virtual_stages: int = 1,
    schedule: str = "1f1b",
) -> float:
    """Layers x micro-batches whose activations the first stage holds at the peak.

    GPipe holds l/p layers for all m micro-batches; 1F1B holds l/p layers for min(p, m)
    micro-batches; interleaving holds l (1 + (p-1)/(p v)) in total (arXiv 2104.04473, 2205.05198).
    ZB-H1 holds as much as 1F1B, ZB-H2 l/p layers for min(2p - 1, m) (arXiv 2401.10241).
    """
    if schedule == "gpipe":
        if num_microbatches is None:
            raise ValueError("in_flight_layers: GPipe keeps all micro-batches; say how many")
        return num_layers / pp * num_microbatches
    if schedule == "zb_h2":
        return num_layers / pp * min(2 * pp - 1, num_microbatches or 2 * pp - 1)
    if virtual_stages > 1:
        return num_layers * (1 + (pp - 1) / (pp * virtual_stages))
    return num_layers / pp * min(pp, num_microbatches or pp)


# ----------------------------------------------------------------------------------- a whole plan


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the fullest GPU. `working` is temporary memory (layers gathered by ZeRO-3, the block
    that is being recomputed) and the memory of the framework itself."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.working

    @property
    def model_states(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def parameters_per_gpu(*, model: Transformer, parallelism: ParallelismConfig) -> float:
    """Parameters per GPU on the fullest stage: its blocks and one table (without a pipeline the
    whole model), divided by tp, its routed experts by ep. Norms are small and are counted as
    if divided, too."""
    p = parallelism
    layers = -(-model.num_layers // p.pp)
    whole = model.block_parameters - model.routed_weights
    if p.pp == 1:
        rest = model.num_parameters - layers * model.routed_weights
    else:
        rest = layers * whole + model.vocab_size * model.width
    return rest / p.tp + layers * routed_per_gpu(model=model, parallelism=p)


def routed_per_gpu(*, model: Transformer, parallelism: ParallelismConfig) -> float:
    """Entries of one block's routed experts on one GPU: cut by ep, or without ep by tp."""
    return model.routed_weights / (parallelism.ep if parallelism.ep > 1 else parallelism.tp)


def shard_parameters(*, model: Transformer, parallelism: ParallelismConfig) -> float:
    """Parameters of which one GPU has the optimiser state with ZeRO: an equal share of what its
    stage holds. ep ranks hold different experts, so the share does not depend on ep."""
    whole = dataclasses.replace(parallelism, ep=1)
    return parameters_per_gpu(model=model, parallelism=whole) / parallelism.zero_ranks


def memory_per_gpu(
    *,
    model: Transformer,
    parallelism: ParallelismConfig,
    micro_batch: int = 1,
    num_microbatches: int | None = None,
    states: StateBytes = MIXED_ADAM,
    recompute: str = "none",
    fused_attention: bool = False,
    dropout: bool = False,
    autocast: bool = False,
    framework_bytes: float = 2e9,
    offload: bool = False,
    schedule: str = "1f1b",
) -> Memory:
    """Bytes on the fullest GPU of a plan.

    Args:
        micro_batch: sequences per micro-batch and data-parallel rank.
        autocast: the model trains under `torch.autocast`, with `states` in fp32: it keeps more
            activations, and 16-bit copies of the weights until backward.
        framework_bytes: CUDA context, NCCL buffers, allocator slack. 2 GB is a rough figure.
        offload: the optimiser's states are in host memory.
        schedule: of the pipeline, as in `predict_step`.

    >>> from minidist.cost.transformer import GPT3_175B
    >>> plan = ParallelismConfig(dp=2, pp=4, tp=8)  # 64 GPUs: the model states alone are too much
    >>> round(memory_per_gpu(model=GPT3_175B, parallelism=plan).model_states / 1e9)
    88
    """
    p = parallelism
    held = parameters_per_gpu(model=model, parallelism=p)
    shard = shard_parameters(model=model, parallelism=p)
    layer_bytes = functools.partial(
        activation_bytes_per_layer,
        model=model,
        micro_batch=micro_batch,
        tp=p.tp,
        cp=p.cp,
        sequence_parallel=p.sequence_parallel,
        fused_attention=fused_attention,
        dropout=dropout,
        autocast=autocast,
    )
    per_layer = layer_bytes(recompute=recompute)
    stage_layers = -(-model.num_layers // p.pp)
    layers = in_flight_layers(
        num_layers=stage_layers * p.pp,
        pp=p.pp,
        num_microbatches=num_microbatches,
        virtual_stages=p.virtual_stages,
        schedule=schedule,
    )
    tokens = model.context / p.cp * micro_batch
    logits = 6 * tokens * model.vocab_size / p.tp  # 2 bytes, and 4 bytes (fp32) for the loss
    if p.pp == 1:
        activations = layers * per_layer + logits
    else:  # the first stage holds the most micro-batches, the last stage holds the logits
        activations = max(layers * per_layer, stage_layers * per_layer + logits)
    # During backward one block at a time has all its activations.
    again = layer_bytes(recompute="none") if recompute == "full" else 0.0
    gathered = 0.0
    if p.zero_stage == 3:  # the block in use, the next block (prefetched), and one gradient
        block = (model.block_parameters - model.routed_weights) / p.tp
        block += routed_per_gpu(model=model, parallelism=p)
        gathered = block * (2 * states.parameter + states.gradient)
    return Memory(
        parameters=states.parameter * (shard if p.zero_stage >= 3 else held),
        gradients=states.gradient * (shard if p.zero_stage >= 2 else held),
        optimizer=0.0 if offload else states.optimizer * (shard if p.zero_stage else held),
        activations=activations,
        working=again + gathered + framework_bytes + (2 * held if autocast else 0),
    )
