"""Idle time of pipelines, and of model parallelism without a pipeline.

p stages, m micro-batches, v chunks of layers per stage. Every stage takes t_F forward and t_B
backward per micro-batch. In the rows ZB-..., t_B is the backward for the inputs only and t_W is the
backward for the weights.

                        bubble time              of the ideal time   of the step
    GPipe, 1F1B         (p-1)(t_F + t_B)         (p-1)/m             (p-1)/(m+p-1)
    interleaved 1F1B    (p-1)(t_F + t_B)/v       (p-1)/(v m)         (p-1)/(v m+p-1)
    ZB-H1               (p-1)(t_F + t_B - t_W)   for equal times (p-1)/(3m)
    ZB-H2               (p-1)(t_F + t_B - 2t_W)  for equal times 0
    ZB-V                                         for equal times 0

(p-1)/m is the bubble divided by the IDEAL time m (t_F + t_B), not by the step: for p = m = 8 the
bubble is 7/15 of the step. GPipe and 1F1B have the same bubble; GPipe holds the activations of m
micro-batches, 1F1B of min(p, m).
(GPipe arXiv 1811.06965; 1F1B and interleaving 2104.04473, section 2.2; zero bubble 2401.10241.)

>>> round(bubble_fraction(num_stages=8, num_microbatches=8), 3)
0.467
>>> [round(100 * pipeline_utilization(num_stages=4, num_microbatches=m), 1) for m in (4, 8, 16, 32)]
[57.1, 72.7, 84.2, 91.4]
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v")


def _checked(num_stages: int, num_microbatches: int, virtual_stages: int) -> None:
    if min(num_stages, num_microbatches, virtual_stages) < 1:
        raise ValueError(
            "a pipeline needs at least 1 stage, 1 micro-batch and 1 chunk, got "
            f"{num_stages}, {num_microbatches}, {virtual_stages}"
        )


def bubble_seconds(
    *,
    num_stages: int,
    forward_s: float,
    backward_s: float,
    weight_backward_s: float = 0.0,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
) -> float:
    """Idle time of a stage per step. Transfers are assumed to take no time.

    Args:
        backward_s: of one micro-batch, for inputs and weights together.
        weight_backward_s: the part of backward_s for the weights (the zb schedules use it).
    """
    _checked(num_stages, 1, virtual_stages)
    both = forward_s + backward_s
    input_backward_s = backward_s - weight_backward_s
    if schedule in ("gpipe", "1f1b"):
        return (num_stages - 1) * both
    if schedule == "interleaved":
        return (num_stages - 1) * both / virtual_stages
    if schedule == "zb_h1":
        return (num_stages - 1) * (forward_s + input_backward_s - weight_backward_s)
    if schedule == "zb_h2":
        return (num_stages - 1) * (forward_s + input_backward_s - 2 * weight_backward_s)
    if schedule == "zb_v" and forward_s == input_backward_s == weight_backward_s:
        return 0.0
    if schedule == "zb_v":
        raise ValueError("ZB-V has a closed form only for equal times; simulate it")
    raise ValueError(f"unknown schedule {schedule!r}, known are {', '.join(SCHEDULES)}")


def bubble_fraction(
    *,
    num_stages: int,
    num_microbatches: int,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    weight_backward_s: float | None = None,
) -> float:
    """Idle share of the STEP, between 0 and 1.

    The default times are the usual ratio: backward takes twice as long as forward, and half of
    backward is for the weights.
    """
    _checked(num_stages, num_microbatches, virtual_stages)
    weight_s = backward_s / 2 if weight_backward_s is None else weight_backward_s
    bubble_s = bubble_seconds(
        num_stages=num_stages,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_backward_s=weight_s,
        schedule=schedule,
        virtual_stages=virtual_stages,
    )
    return bubble_s / (num_microbatches * (forward_s + backward_s) + bubble_s)


def bubble_ratio(*, num_stages: int, num_microbatches: int, virtual_stages: int = 1) -> float:
    """Bubble / IDEAL time, (p-1)/(v m), as in Megatron's papers. Above 1 for few micro-batches."""
    _checked(num_stages, num_microbatches, virtual_stages)
    return (num_stages - 1) / (virtual_stages * num_microbatches)


def pipeline_utilization(
    *, num_stages: int, num_microbatches: int, virtual_stages: int = 1
) -> float:
    """Busy share of the step: v m / (v m + p - 1)."""
    _checked(num_stages, num_microbatches, virtual_stages)
    work = virtual_stages * num_microbatches
    return work / (work + num_stages - 1)


def microbatches_for(*, num_stages: int, utilization: float, virtual_stages: int = 1) -> int:
    """The fewest micro-batches that reach a utilisation: m >= (p-1) u / (v (1-u)).

    >>> microbatches_for(num_stages=4, utilization=0.9)
    27
    """
    if not 0 < utilization < 1:
        raise ValueError(f"utilization is between 0 and 1, got {utilization}")
    m = 1
    needed = (num_stages - 1) * utilization / (virtual_stages * (1 - utilization))
    m = max(1, int(needed))
    while (
        pipeline_utilization(
            num_stages=num_stages, num_microbatches=m, virtual_stages=virtual_stages
        )
        < utilization - 1e-12
    ):
        m += 1
    return m


@dataclass(frozen=True, kw_only=True)
class NaiveModelParallel:
    """Times of a model whose layers are on several GPUs that work one after the other."""

    forward_s: float
    total_s: float
    utilization: float


def naive_model_parallel(
    *,
    num_layers: int,
    num_gpus: int,
    layer_s: float,
    transfer_s: float,
) -> NaiveModelParallel:
    """One batch through all layers and back at the same speed, without micro-batches.

    forward = l * layer + (n-1) * transfer, also if the layers do not divide evenly over the GPUs.
    utilisation = busy GPU time / (n * total): at most 1/n, for any transfer time.

    >>> r = naive_model_parallel(num_layers=12, num_gpus=3, layer_s=0.010, transfer_s=0.005)
    >>> round(r.forward_s * 1e3), round(r.total_s * 1e3), round(100 * r.utilization, 1)
    (130, 260, 30.8)
    """
    if num_layers < num_gpus or num_gpus < 1:
        raise ValueError(f"{num_layers} layers cannot be spread over {num_gpus} GPUs")
    hops_s = (num_gpus - 1) * transfer_s
    compute_s = num_layers * layer_s
    total_s = 2 * (compute_s + hops_s)
    return NaiveModelParallel(
        forward_s=compute_s + hops_s,
        total_s=total_s,
        utilization=2 * compute_s / (num_gpus * total_s),
    )
