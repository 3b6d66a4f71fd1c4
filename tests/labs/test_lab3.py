"""Lab 3: the reference solution as a script, judges that nothing confuses, and the memory limit."""

from __future__ import annotations

import operator
from functools import partial

import numpy as np
import pytest
import torch
from lab_helper import assert_none_confuses, make_case, run_solution, sizes
from torch import nn

from autograder.criteria import get_lab
from autograder.criteria.common.memory_limit import BLOCKS, PARAMETER_BYTES
from autograder.criteria.criterion import Case, Context
from autograder.criteria.lab3_fsdp import gpu, limit, memory, parts
from autograder.referee.referee import draw_for

NAME = "lab3_fsdp"
LAB = get_lab(NAME)
HOSTILE = (
    None,
    "text",
    [],
    [None],
    [{}],
    {},
    True,
    -1,
    10**9,
    float("nan"),
    np.array(np.nan),
    np.zeros(0),
    np.array(["text"]),
    np.zeros((3, 3), dtype=np.complex64),
    np.full((9, 5), np.inf, dtype=np.float32),
    np.zeros((9, 5), dtype=np.float16),
)


@pytest.mark.parametrize("num_ranks", sizes())
def test_the_solution_runs_as_a_script(num_ranks, tmp_path):
    run_solution(NAME, num_ranks, tmp_path)


def test_names():
    assert all(criterion.name.startswith("fsdp_") for criterion in LAB.criteria)


@pytest.mark.parametrize("criterion", LAB.criteria, ids=lambda c: c.name)
def test_no_answer_passes_and_none_confuses_the_judge(criterion, monkeypatch):
    monkeypatch.setattr(gpu, "WIDTH", 32)  # its own is large for a judge on a CPU
    assert criterion.findings(make_case(LAB, criterion, [{}, {}, {}]))
    assert_none_confuses(LAB, criterion, HOSTILE, 3)


@pytest.mark.parametrize("criterion", LAB.criteria, ids=lambda c: c.name)
def test_draws_are_private_or_fresh(criterion):
    first, again = (
        criterion.draw(draw_for(b"test", NAME, criterion.name, attempt, 3))
        for attempt in ("first", "second")
    )
    assert len(first) == len(again) == 3
    assert repr(first) != repr(again)


def test_every_value_of_a_drawn_model_occurs_once():
    values = parts.draw_mlp(np.random.default_rng(1), (84,) * 7)
    flat = np.concatenate([v.ravel() for v in values.values()])
    assert len(np.unique(flat)) == len(flat)
    assert (flat != 0).all()


def test_the_formula_has_the_numbers_of_the_zero_paper():
    # 7.5 billion parameters on 64 ranks: figure 1 of arXiv 1910.02054.
    totals = [
        sum(memory.state_bytes(7_500_000_000, 64, strategy, True)) / 1e9
        for strategy in memory.STRATEGIES
    ]
    assert totals == pytest.approx([120, 31.4, 16.6, 1.9], rel=0.02)


# --- every draw kills ----------------------------------------------------------------------------


def choose(num_params, num_ranks, budget, mixed=False, *, fits=operator.le, up=True):
    """`choose_strategy`, with a place for two slips."""
    for strategy in memory.STRATEGIES:
        padded = num_params if up else num_params // num_ranks * num_ranks
        if fits(sum(memory.state_bytes(padded, num_ranks, strategy, mixed)), budget):
            return strategy
    return "offload"


def traffic(num_params, num_ranks, strategy, itemsize=4, *, passes=3, fixed=False):
    """`traffic_per_rank`, with a place for two slips."""
    factor = passes if strategy == "zero3" else 2
    return factor * (num_ranks - 1) / num_ranks * num_params * (4 if fixed else itemsize)


@pytest.mark.parametrize(
    ("subject", "is_right"),
    [
        ((traffic, choose), True),
        ((traffic, partial(choose, fits=operator.lt)), False),
        ((traffic, partial(choose, up=False)), False),
        ((partial(traffic, fixed=True), choose), False),
        ((partial(traffic, passes=2), choose), False),
    ],
)
def test_every_draw_of_a_choice_gives_the_same_verdict(subject, is_right):
    criterion = LAB["fsdp_choice"]
    for seed in range(100):
        inputs = criterion.draw(draw_for(b"test", NAME, criterion.name, str(seed), 3))
        answers = [
            criterion.observe(subject, each, Context(rank, 3, torch.device("cpu")))
            for rank, each in enumerate(inputs)
        ]
        case = Case(3, inputs, answers)
        assert (criterion.findings(case) == []) is is_right, f"seed {seed}"


def test_every_rank_is_the_slowest_once():
    criterion = LAB["fsdp_throughput"]
    for seed in range(100):
        inputs = criterion.draw(draw_for(b"test", NAME, criterion.name, str(seed), 3))
        # The seconds of the timed steps: the slowest rank's steps take 2 ms longer.
        slowest = [
            max(range(3), key=lambda rank: min(inputs[rank]["work"][case])) for case in range(3)
        ]
        assert sorted(slowest) == [0, 1, 2], f"seed {seed}"


# --- the memory limit ----------------------------------------------------------------------------


def whole_model(make_model, batches, lr):
    """What one rank alone would write: everything whole, nothing talks."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_whole_training_state_does_not_fit():
    criterion = LAB["fsdp_budget"]
    inputs = criterion.draw(draw_for(b"test", NAME, criterion.name, "test", 3))
    context = Context(0, 3, torch.device("cpu"))
    answer = limit.observe_function(whole_model, inputs[0], context)
    findings = criterion.findings(make_case(LAB, criterion, [answer, {}, {}]))
    assert "out of memory" in findings[0].message
    assert not any(result["status"] == "ok" for result in answer["results"])


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (None, "train_large returned None"),
        ([1.0, None], "train_large: expected a list of floats, got [1.0, None]"),
        ({1: 2.0}, "train_large: expected a list of floats, got {1: 2.0}"),
    ],
)
def test_losses_that_are_no_numbers_are_told(losses, said):
    criterion = LAB["fsdp_budget"]
    inputs = criterion.draw(draw_for(b"test", NAME, criterion.name, "test", 3))
    context = Context(0, 1, torch.device("cpu"))
    answer = limit.observe_function(lambda *_: losses, inputs[0], context)
    findings = criterion.findings(make_case(LAB, criterion, [answer, {}, {}]))
    assert said in findings[0].message


@pytest.mark.parametrize(
    ("text", "otherwise"),
    [("rank 1 was ended by SIGSEGV", True), ("SIGABRT: what(): std::bad_alloc", False)],
)
def test_a_signal_alone_is_not_called_lack_of_memory_only(text, otherwise):
    answer = {"results": [{"status": "died", "text": text}]}
    findings = LAB["fsdp_limit"].findings(make_case(LAB, LAB["fsdp_limit"], [answer, {}, {}]))
    assert ("ended by a signal" if otherwise else "out of memory") in findings[0].message
    assert ("still wrote into it" in findings[0].message) is otherwise


def test_the_allowance_lies_between_what_is_sharded_and_what_is_not():
    unit = 1 / BLOCKS
    for copies in (2, 4):
        for num_ranks in range(2, 9):
            allowed = limit.allowance_bytes(num_ranks, copies) / PARAMETER_BYTES
            assert allowed > copies / num_ranks + 15 * unit  # shards; gathered and reduced units
            assert allowed > 1 + 2 * unit  # the model as it is built, a unit and its shards
            assert allowed < copies / num_ranks + 1  # all units whole at once
            assert copies == 2 or allowed < 2 + 2 / num_ranks  # ZeRO-1
