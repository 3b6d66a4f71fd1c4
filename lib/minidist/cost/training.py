"""Training time, GPU hours, money and utilisation.

    FLOPs      6 N D                N parameters, D tokens (Kaplan et al., arXiv 2001.08361)
    with full recomputation 8 N D   one more forward pass (arXiv 2104.04473, equation 4)
    seconds    FLOPs / (n X)        n GPUs that reach X FLOP/s each
    MFU        model FLOPs / (seconds * n * peak), without recomputation (PaLM, arXiv 2204.02311)
    HFU        the same with all computed FLOPs, including recomputation; HFU >= MFU

Example: 300 billion tokens at 1000 tokens/s take 3,472 days, for any model.

>>> round(training_seconds(tokens=300e9, tokens_per_s=1000) / DAY_S)
3472
>>> days = training_seconds_from_flops(
...     num_parameters=175e9, tokens=300e9, num_gpus=1024, flops_per_s_per_gpu=140e12,
...     flops_per_parameter=8) / DAY_S
>>> round(days, 1)  # arXiv 2104.04473 says 34
33.9
"""

from __future__ import annotations

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
YEAR_S = 365.25 * DAY_S


def training_flops(
    *, num_parameters: float, tokens: float, flops_per_parameter: float = 6
) -> float:
    """6 N D; 8 N D with full recomputation. Attention scores are not included: see
    `Transformer.flops_per_token`.

    >>> training_flops(num_parameters=175e9, tokens=300e9)  # GPT-3: 3.14e23 in arXiv 2005.14165
    3.15e+23
    """
    return flops_per_parameter * num_parameters * tokens


def training_seconds(*, tokens: float, tokens_per_s: float) -> float:
    """Tokens (or samples) of all epochs divided by throughput. The batch size cancels."""
    if tokens < 0 or tokens_per_s <= 0:
        raise ValueError(f"need tokens >= 0 and a rate above 0, got {tokens}, {tokens_per_s}")
    return tokens / tokens_per_s


def training_seconds_from_flops(
    *,
    num_parameters: float,
    tokens: float,
    num_gpus: int,
    flops_per_s_per_gpu: float,
    flops_per_parameter: float = 6,
) -> float:
    """Time = k N D / (n X), with k FLOPs per parameter and token."""
    work = training_flops(
        num_parameters=num_parameters, tokens=tokens, flops_per_parameter=flops_per_parameter
    )
    return work / (num_gpus * flops_per_s_per_gpu)


def peak_tokens_per_s(*, num_parameters: float, peak_flops_per_s: float) -> float:
    """The upper limit of a GPU's training speed, peak / 6N. It shows which claims are impossible.

    >>> round(peak_tokens_per_s(num_parameters=70e9, peak_flops_per_s=312e12))  # one A100
    743
    """
    return peak_flops_per_s / (6 * num_parameters)


def utilization(
    *, flops_per_token: float, tokens_per_s: float, num_gpus: int, peak_flops_per_s: float
) -> float:
    """MFU if flops_per_token is without recomputation, HFU if it includes recomputation."""
    return flops_per_token * tokens_per_s / (num_gpus * peak_flops_per_s)


def gpu_hours(*, seconds: float, num_gpus: int) -> float:
    """GPUs times hours."""
    return num_gpus * seconds / HOUR_S


def cost_dollars(*, gpu_hours: float, dollars_per_gpu_hour: float) -> float:
    """The rent of the GPUs.

    >>> cost_dollars(gpu_hours=1000 * 7 * 24, dollars_per_gpu_hour=2)
    336000
    """
    return gpu_hours * dollars_per_gpu_hour


def cost_saving(*, utilization_before: float, utilization_after: float) -> float:
    """Share of the bill saved when the same work runs at a higher utilisation: 1 - before / after.

    >>> round(cost_saving(utilization_before=0.6, utilization_after=0.9), 3)  # not 50 %
    0.333
    """
    if not 0 < utilization_before <= 1 or not 0 < utilization_after <= 1:
        raise ValueError("utilisations are in (0, 1]")
    return 1 - utilization_before / utilization_after


def tokens_per_step(
    *, micro_batch: int, context: int, dp: int = 1, accumulation_steps: int = 1
) -> int:
    """micro-batch * context * accumulation * dp. Tensor, pipeline and context parallel ranks do not
    multiply the tokens, because they work on the same sequences.

    >>> tokens_per_step(micro_batch=1, context=8192, dp=128, accumulation_steps=16)
    16777216
    """
    return micro_batch * context * dp * accumulation_steps
