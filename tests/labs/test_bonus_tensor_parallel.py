"""Bonus "A tensor-parallel transformer layer": the solution as a script, judges, oracle, traces."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from lab_helper import assert_none_confuses, make_case, run_solution, sizes

from autograder.criteria import get_lab
from autograder.criteria.bonus_tensor_parallel import model, traffic
from autograder.criteria.criterion import Case, Finding, Values
from autograder.proof.verify import choose_covering
from autograder.proof.zoo import load_zoo
from autograder.referee.referee import draw_for
from minidist.emulate.trace import Collective, Event

NAME = "bonus_tensor_parallel"
LAB = get_lab(NAME)
WORLD_SIZE = 4
HOSTILE = (
    None,
    "text",
    [],
    ["column", "row"],
    {},
    True,
    -1,
    float("nan"),
    np.array(np.nan),
    np.array(4.0),
    np.zeros(0),
    np.array(["text"]),
    np.zeros((3, 3), dtype=np.complex64),
    np.full((2, 8, 32), np.inf),
    np.full((2, 8, 32), 1e300),
    np.ones(200, dtype=np.int64),
    np.zeros(32),
)


@pytest.mark.parametrize("num_ranks", sizes())
def test_the_solution_runs_as_a_script(num_ranks, tmp_path):
    run_solution(NAME, num_ranks, tmp_path)


def test_few_submissions_lose_every_criterion():
    assert len(choose_covering(LAB, load_zoo(NAME))) <= len(LAB.criteria)


@pytest.mark.parametrize("criterion", LAB.criteria, ids=lambda c: c.name)
def test_no_answer_passes_and_none_confuses_the_judge(criterion):
    assert criterion.findings(make_case(LAB, criterion, [{} for _ in range(WORLD_SIZE)]))
    assert_none_confuses(LAB, criterion, HOSTILE, WORLD_SIZE)


@pytest.mark.parametrize("criterion", LAB.criteria, ids=lambda c: c.name)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_draws_are_fresh_and_serve_every_world_size(criterion, world_size):
    first, again = (
        criterion.draw(draw_for(b"test", NAME, criterion.name, attempt, world_size))
        for attempt in ("first", "second")
    )
    assert len(first) == len(again) == world_size
    assert repr(first) != repr(again)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_parts_add_up_to_the_whole(world_size):
    draw = draw_for(b"test", NAME, "btp_block", "test", world_size)
    values = model.draw_block(draw)[0]
    for name in ("qkv.w", "qkv.b", "up.w", "up.b", "down.w", "out.w"):
        parts = [model.part_of(name, values[name], r, world_size) for r in range(world_size)]
        assert sum(part.size for part in parts) == values[name].size
        assert sorted(np.concatenate([p.ravel() for p in parts])) == sorted(values[name].ravel())
    for name in ("out.b", "down.b", "norm1.w"):
        assert model.part_of(name, values[name], 0, world_size) is values[name]


# --- traces --------------------------------------------------------------------------------------


def case_with(name: str, answer: Values, sent: dict[str, list[tuple[str, int]]]) -> Case:
    """Right answers, and on every rank these collectives in each pass; the first one sums."""
    case = make_case(LAB, LAB[name], [dict(answer) for _ in range(WORLD_SIZE)])
    assert case.trace is not None
    everybody = tuple(range(WORLD_SIZE))
    for events in case.trace.events:
        for direction, calls in sent.items():
            events.append(Event(kind="compute", direction=direction, layer=0, step=0))
            for number, (collective, num_bytes) in enumerate(calls):
                events.append(
                    Event(
                        kind="issue",
                        collective=collective,
                        nbytes=num_bytes,
                        ranks=everybody,
                        key=f"{direction}/{number}",
                    )
                )
    shares = model.summands(case.inputs[0], WORLD_SIZE, "transform")
    for direction in sent:
        case.trace.collectives.append(
            Collective(
                key=f"{direction}/0",
                kind="all_reduce",
                op="sum",
                group="all",
                ranks=everybody,
                shape=(),
                numel=0,
                nbytes=0,
                dtype="float64",
                completed=True,
                payloads={rank: share[direction][0].ravel() for rank, share in enumerate(shares)},
            )
        )
    return case


def mlp_case(forward: list[tuple[str, int]], backward: list[tuple[str, int]]) -> Case:
    inputs = make_case(LAB, LAB["btp_mlp_traffic"], [{}] * WORLD_SIZE).inputs
    right = model.solve(inputs[0], "transform")
    answer = {"y": right["y"], "x": right["x"]}
    return case_with("btp_mlp_traffic", answer, {"forward": forward, "backward": backward})


def test_traffic_is_counted():
    draw = draw_for(b"test", NAME, "btp_mlp_traffic", "test", WORLD_SIZE)
    whole = traffic.draw(draw)[0]["x"].nbytes
    once = [("all_reduce", whole)]

    def judge(case: Case) -> list[Finding]:
        return list(traffic.judge_mlp(case))

    assert not judge(mlp_case(once, once))
    assert not judge(mlp_case([*once, ("barrier", 0), ("all_gather", 64)], once))
    for forward, backward in (
        ([*once, ("all_gather", 4 * whole)], once),
        (once, 3 * once),
        ([("all_reduce", 2 * whole)], once),
        (100 * [("all_reduce", 500)], 100 * [("all_reduce", 500)]),
    ):
        found = judge(mlp_case(forward, backward))
        assert len(found) == WORLD_SIZE
        assert f"expected one all_reduce of {whole} bytes" in found[0].message


def test_missing_passes_and_wrong_numbers_are_told():
    draw = draw_for(b"test", NAME, "btp_mlp_traffic", "test", WORLD_SIZE)
    once = [("all_reduce", traffic.draw(draw)[0]["x"].nbytes)]
    case = mlp_case(once, once)
    for share_of, told in (
        (lambda rank: 1 / WORLD_SIZE, f"That is divided by {WORLD_SIZE}"),
        (lambda rank: (rank + 1) / sum(range(1, WORLD_SIZE + 1)), "an all-reduce is missing"),
    ):
        shares = [dict(a, x=a["x"] * share_of(rank)) for rank, a in enumerate(case.answers)]
        found = list(traffic.judge_mlp(dataclasses.replace(case, answers=shares)))
        assert told in found[0].message
    assert case.trace is not None
    case.trace.events[2].clear()
    assert [f.rank for f in traffic.judge_mlp(case)] == [2]
