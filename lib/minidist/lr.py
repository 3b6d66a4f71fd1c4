"""Learning rates of distributed training: scaling with the batch, warm-up, decay.

More ranks make the batch larger. A larger batch has a less noisy gradient, which allows a larger
step. **Linear rule** (SGD): k times the batch, k times the rate. **Square-root rule** (often with
Adam): k times the batch, sqrt(k) times the rate. At the beginning of a training the network changes
fast and both rules fail, so the rate is warmed up:

    rate   peak         . - - .
                      .         ` .
           start    .               ` .
                                        ` . final
           step    0    warmup_steps        total_steps

Goyal et al. trained ResNet-50 in this way: rate 0.1 for a batch of 256, hence 3.2 for 8192, warmed
up from 0.1 over 5 epochs (and divided by 10 after 30, 60 and 80 epochs). 256 GPUs reached the
accuracy of the small batch in one hour, with about 90 % scaling efficiency.

>>> round(scale_lr(0.1, batch_size=8192, base_batch_size=256), 6)
3.2
>>> warmup_steps = 5 * 1_281_167 // 8192  # images of ImageNet
>>> schedule = dict(peak_lr=3.2, start_lr=0.1, warmup_steps=warmup_steps, total_steps=14076)
>>> [round(lr_at(step, **schedule), 3) for step in (0, 391, warmup_steps, 14076)]
[0.1, 1.652, 3.2, 0.0]

Paper: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv 1706.02677.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

Decay = Literal["cosine", "linear", "constant"]


def scale_lr(
    base_lr: float,
    *,
    batch_size: int,
    base_batch_size: int = 256,
    rule: Literal["linear", "sqrt"] = "linear",
) -> float:
    """The rate for a batch size, from a rate that works well for a different batch size.

    Args:
        base_lr: a rate that works well for `base_batch_size`.
        batch_size: samples that one step averages over: all ranks and accumulation steps together.
        rule: "linear" or "sqrt".

    >>> scale_lr(1e-3, batch_size=1024, base_batch_size=256, rule="sqrt")
    0.002

    Raises:
        ValueError: a size is below 1, or the rule is unknown.
    """
    if batch_size < 1 or base_batch_size < 1:
        raise ValueError(
            f"scale_lr: batch sizes must be at least 1, got {batch_size} and {base_batch_size}"
        )
    factor = batch_size / base_batch_size
    if rule == "linear":
        return base_lr * factor
    if rule == "sqrt":
        return base_lr * math.sqrt(factor)
    raise ValueError(f'scale_lr: rule must be "linear" or "sqrt", got {rule!r}')


def lr_at(
    step: int,
    *,
    peak_lr: float,
    total_steps: int,
    warmup_steps: int = 0,
    decay: Decay = "cosine",
    final_lr: float = 0.0,
    start_lr: float | None = None,
) -> float:
    """The rate of optimiser step `step`, counted from 0: linear warm-up, then decay.

    >>> schedule = dict(peak_lr=1.0, warmup_steps=4, total_steps=8, decay="linear")
    >>> [lr_at(step, **schedule) for step in range(9)]
    [0.2, 0.4, 0.6, 0.8, 1.0, 0.75, 0.5, 0.25, 0.0]

    Args:
        peak_lr: the rate at step `warmup_steps`, exactly.
        total_steps: length of the training. The rate is `final_lr` at this step, which is the first
            step after the training, and at all later steps.
        warmup_steps: steps before the peak; with 0 the training starts at the peak.
        decay: "cosine", "linear" or "constant" (which ignores `final_lr`).
        final_lr: the rate at the end of the decay.
        start_lr: rate of step 0. None means peak_lr / (warmup_steps + 1), so that all increases are
            equal. 0 is refused, because a step with rate 0 is wasted.

    Raises:
        ValueError: an argument is out of range.
    """
    # Validate.
    if step < 0:
        raise ValueError(f"lr_at: step must be at least 0, got {step}")
    if peak_lr <= 0 or final_lr < 0 or (start_lr is not None and start_lr <= 0):
        raise ValueError(
            "lr_at: peak_lr and start_lr must be positive and final_lr not negative, got "
            f"{peak_lr}, {start_lr} and {final_lr}"
        )
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"lr_at: needs 0 <= warmup_steps < total_steps, got {warmup_steps} and {total_steps}"
        )
    if decay not in ("cosine", "linear", "constant"):
        raise ValueError(f'lr_at: decay must be "cosine", "linear" or "constant", got {decay!r}')
    # Warm-up.
    if step < warmup_steps:
        start_lr = peak_lr / (warmup_steps + 1) if start_lr is None else start_lr
        share = step / warmup_steps
        return start_lr * (1 - share) + peak_lr * share
    # Decay: `left` goes from 1 (the rate is peak_lr) to 0 (the rate is final_lr).
    if decay == "constant":
        return peak_lr
    done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    left = 1 - done if decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak_lr * left + final_lr * (1 - left)


def make_scheduler(
    optimizer: torch.optim.Optimizer, *, peak_lr: float, total_steps: int, **schedule: Any
) -> torch.optim.lr_scheduler.LambdaLR:
    """`lr_at` as torch's LambdaLR: call its `step()` after each step of the optimiser.

    A parameter group whose rate differs from `peak_lr` follows the same curve with its own rate as
    the peak.

    Args:
        schedule: the other arguments of `lr_at`.

    Raises:
        ValueError: as `lr_at`.
    """
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: lr_at(step, peak_lr=peak_lr, total_steps=total_steps, **schedule) / peak_lr,
    )


def resume_scheduler(scheduler: torch.optim.lr_scheduler.LambdaLR, state: dict[str, Any]) -> None:
    """Load a scheduler's state and set the optimiser's rates to match this state.

    `load_state_dict` alone does not change the rates, and the constructor of the scheduler has set
    the rates to those of step 0. So the first step after a resume would use the wrong rate. The new
    rates come from the schedule of this scheduler, so a changed `total_steps` takes effect.
    """
    scheduler.load_state_dict(state)
    rates = [
        base_lr * factor(scheduler.last_epoch)
        for base_lr, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
