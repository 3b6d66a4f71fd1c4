"""Learning rates: scaling rules, the exact ends of warm-up and decay, torch's scheduler, resume."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.lr import lr_at, make_scheduler, resume_scheduler, scale_lr


def test_scaling_rules():
    assert scale_lr(0.1, batch_size=8192) == pytest.approx(3.2)
    assert scale_lr(0.1, batch_size=256) == 0.1
    assert scale_lr(3e-4, batch_size=64, base_batch_size=16, rule="sqrt") == pytest.approx(6e-4)
    assert scale_lr(0.4, batch_size=8, base_batch_size=32) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="at least 1"):
        scale_lr(0.1, batch_size=0)
    with pytest.raises(ValueError, match="'cubic'"):
        scale_lr(0.1, batch_size=1, rule="cubic")  # type: ignore[arg-type]


@settings(max_examples=60, derandomize=True, database=None)
@given(
    peak_lr=st.floats(1e-6, 10.0),
    warmup_steps=st.integers(0, 50),
    decay_steps=st.integers(1, 100),
    decay=st.sampled_from(["cosine", "linear", "constant"]),
    final=st.floats(0.0, 1.0),
    start=st.one_of(st.none(), st.floats(0.01, 1.0)),
)
def test_every_schedule_starts_above_zero_peaks_where_it_says_and_ends(
    peak_lr, warmup_steps, decay_steps, decay, final, start
):
    total_steps = warmup_steps + decay_steps
    start_lr = None if start is None else start * peak_lr
    rates = [
        lr_at(
            step,
            peak_lr=peak_lr,
            total_steps=total_steps,
            warmup_steps=warmup_steps,
            decay=decay,
            final_lr=final * peak_lr,
            start_lr=start_lr,
        )
        for step in range(total_steps + 3)
    ]
    assert rates[0] > 0
    assert rates[warmup_steps] == peak_lr  # exactly
    assert max(rates) <= peak_lr * (1 + 1e-12)
    if warmup_steps:
        expected = peak_lr / (warmup_steps + 1) if start_lr is None else start_lr
        assert rates[0] == pytest.approx(expected)
        steps = [b - a for a, b in pairwise(rates[: warmup_steps + 1])]
        assert steps == pytest.approx([steps[0]] * warmup_steps, abs=1e-9 * peak_lr)
        assert steps[0] >= -1e-12
    after = rates[warmup_steps:]
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(after))
    end = peak_lr if decay == "constant" else final * peak_lr
    assert rates[total_steps:] == pytest.approx([end] * 3, abs=1e-12 * peak_lr)


def test_cosine_is_torchs_cosine():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.05)
    for step in range(21):
        expected = torchs.get_last_lr()[0]
        assert lr_at(step, peak_lr=0.5, total_steps=20, final_lr=0.05) == pytest.approx(expected)
        optimizer.step()
        torchs.step()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"step": -1}, "step must be at least 0"),
        ({"peak_lr": 0.0}, "must be positive"),
        ({"start_lr": 0.0}, "must be positive"),
        ({"final_lr": -0.1}, "not negative"),
        ({"warmup_steps": 10}, "warmup_steps < total_steps"),
        ({"decay": "exp"}, "got 'exp'"),
    ],
)
def test_wrong_arguments(arguments, text):
    good = {"step": 0, "peak_lr": 1.0, "total_steps": 10}
    with pytest.raises(ValueError, match=text):
        lr_at(**{**good, **arguments})


def make(total_steps: int = 12):
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(
        [
            {"params": layers[0].parameters(), "lr": 0.2},
            {"params": layers[1].parameters(), "lr": 0.02},
        ],
        momentum=0.9,
    )
    scheduler = make_scheduler(
        optimizer, peak_lr=0.2, total_steps=total_steps, warmup_steps=3, decay="linear"
    )
    return model, optimizer, scheduler


def train(model, optimizer, scheduler, begin, end):
    rates = []
    for step in range(begin, end):
        optimizer.zero_grad()
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        (model(x) ** 2).mean().backward()
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


def test_scheduler_gives_each_group_its_share():
    rates = train(*make(), 0, 12)
    for step, (first, second) in enumerate(rates):
        expected = lr_at(step, peak_lr=0.2, total_steps=12, warmup_steps=3, decay="linear")
        assert first == pytest.approx(expected)
        assert second == pytest.approx(expected / 10)
    assert rates[3][0] == 0.2
    with pytest.raises(ValueError, match="warmup_steps < total_steps"):
        make_scheduler(torch.optim.SGD([torch.zeros(1)], lr=1.0), peak_lr=1.0, total_steps=0)


@pytest.mark.parametrize("at", [1, 3, 7])
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_resume_is_bit_for_bit(at, optimizer_first):
    whole = make()
    expected = train(*whole, 0, 12)

    model, optimizer, scheduler = make()
    train(model, optimizer, scheduler, 0, at)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))

    torch.manual_seed(0)
    new_model, new_optimizer, new_scheduler = make()
    new_model.load_state_dict(saved[0])
    if optimizer_first:
        # The order that goes wrong with load_state_dict alone: the scheduler comes last.
        new_optimizer.load_state_dict(saved[1])
        for group in new_optimizer.param_groups:
            group["lr"] = 1.0
        resume_scheduler(new_scheduler, saved[2])
    else:
        resume_scheduler(new_scheduler, saved[2])
        new_optimizer.load_state_dict(saved[1])
    assert new_scheduler.get_last_lr() == [group["lr"] for group in new_optimizer.param_groups]
    rates = train(new_model, new_optimizer, new_scheduler, at, 12)
    assert rates == expected[at:]
    for got, want in zip(new_model.parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(got, want)


def test_a_resumed_schedule_may_be_another_one():
    model, optimizer, scheduler = make()
    train(model, optimizer, scheduler, 0, 6)
    longer = make(total_steps=100)
    resume_scheduler(longer[2], scheduler.state_dict())
    assert longer[1].param_groups[0]["lr"] == pytest.approx(
        lr_at(6, peak_lr=0.2, total_steps=100, warmup_steps=3, decay="linear")
    )
