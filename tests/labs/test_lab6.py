"""Lab 6: the reference solution as a script, and what the criteria's own arithmetic rests on."""

from __future__ import annotations

import os
import statistics
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from lab_helper import SameUnderEveryKey, run_solution, sizes

from autograder.criteria import get_lab
from autograder.criteria.criterion import Case, Draw
from autograder.criteria.lab6_profiling import buckets, causes, emulated, shares
from autograder.criteria.lab6_profiling import spans as prof_spans
from autograder.proof.zoo import load_zoo
from autograder.referee.referee import draw_for
from minidist.emulate.clusters import Cluster, Link
from minidist.emulate.simulate import simulate
from minidist.emulate.trace import Event, Trace
from minidist.profile import Span, Timeline, Window, step_shares

LAB = "lab6_profiling"
SEEDS = int(os.environ.get("SEEDS", "5"))  # `make nightly` takes 100

# The others' judges look at the emulated cluster's trace first.
WITHOUT_TRACE = [c for c in get_lab(LAB).criteria if c.world != "emulated"]


def _draw(criterion: str, world_size: int, attempt: str = "0") -> Draw:
    return draw_for(b"test", LAB, criterion, attempt, world_size)


@pytest.mark.parametrize("num_ranks", sizes())
def test_the_solution_runs_as_a_script(num_ranks, tmp_path):
    run_solution(LAB, num_ranks, tmp_path)


@pytest.mark.parametrize("criterion", WITHOUT_TRACE, ids=lambda c: c.name)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_judge_survives_rubbish(criterion, world_size):
    draw = _draw(criterion.name, world_size)
    inputs = criterion.draw(draw)
    number = np.full((2, 2), np.nan)
    everything = ("text", [None], [[None]], [{}], {"traceEvents": [None, {}]}, number, 1e300)
    for value in (None, float("nan"), 10**400, {"a": 1}, *everything):
        answers = [SameUnderEveryKey(value) for _ in range(world_size)]
        assert criterion.findings(Case(world_size, inputs, answers))


def test_the_referee_and_the_library_agree_on_shares():
    rng = np.random.default_rng(0)
    for _ in range(20):
        spans = []
        for _ in range(30):
            start = float(rng.uniform(-1, 5))
            kind = str(rng.choice(["compute", "communication", "copy", "loader"]))
            spans.append(prof_spans.Span(0, kind, "", start, start + float(rng.uniform(0, 1))))
        found = prof_spans.active_seconds(spans, 0.0, 4.0)
        theirs = Timeline(
            tuple(
                Span(rank=0, lane="", kind=s.kind, name="", start_s=s.start, end_s=s.end)
                for s in spans
            ),
            (Window(rank=0, name="", start_s=0.0, end_s=4.0),),
        )
        (share,) = step_shares(theirs)
        assert prof_spans.seconds_of(found, "compute") == pytest.approx(share.compute_s)
        both = prof_spans.seconds_of(found, "compute", "communication")
        assert both == pytest.approx(share.overlapped_s)
        assert found.get(frozenset(), 0.0) == pytest.approx(share.idle_s)


@pytest.mark.parametrize("cause", causes.NAMES)
def test_planted_losses_are_what_the_runs_say(cause):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        for is_cause, run, why in causes._RUNS[cause](rng):
            losses = causes.losses(*run.build(rng))
            largest = max(losses.values())
            answer = max(losses, key=lambda name: losses[name])
            answer = answer if largest > causes.LIMIT else causes.NONE
            assert (answer == cause) == is_cause, (losses, why)
            assert abs(largest - causes.LIMIT) > 0.002, "too near the limit for rounding"
            others = [share for name, share in losses.items() if name != answer]
            assert answer == causes.NONE or max(others) < 0.9 * largest


# Every function that a wrong submission of the table can get wrong, over draws: one verdict.
ZOO = Path(__file__).parents[1] / "zoo" / LAB
TASK_3 = [f.stem for f in sorted(ZOO.iterdir()) if "task3_bottleneck" in f.read_text("utf-8")]
entries = cache(lambda: {entry.name: entry for entry in load_zoo(LAB)})


@pytest.mark.parametrize("name", ["reference", *TASK_3])
def test_every_draw_says_the_same_of_a_bottleneck(name):
    entry = entries()[name]
    names: dict = {"statistics": statistics, "KINDS": prof_spans.KINDS}
    names |= {"covered": prof_spans.covered, "overlap": shares.overlap}
    names |= {"breakdown": shares.breakdown, "Span": prof_spans.Span}
    solved = {cell.id: cell.source for cell in entry.notebook.cells}
    own = {"task2_shares", "task3_bottleneck"} & {*entry.replaced, "task3_bottleneck"}
    for name in sorted(own):  # its helpers may stand in the earlier cell
        exec(solved[name], names)
    for criterion in (c for c in get_lab(LAB).criteria if c.name.startswith("prof_finds_")):
        for seed in range(SEEDS):
            (inputs,) = criterion.draw(_draw(criterion.name, 1, str(seed)))
            answer = causes.observe(names["find_bottleneck"], inputs, None)
            lost = bool(criterion.findings(Case(1, [inputs], [answer])))
            assert lost == (criterion.name in entry.loses), (criterion.name, seed)


def test_predicted_steps_are_those_of_the_emulated_cluster():
    for seed in range(10):
        rng = np.random.default_rng(seed)
        network = buckets.draw_network(rng, 0.8, 0.6, 10)
        plan = buckets.fill_buckets(network["sizes"], sum(network["sizes"]) / 4)
        ranks, rounds = 3, 4
        link = Link(
            bandwidth_bytes_per_s=rounds / ranks / network["s_per_byte"],
            latency_s=network["fixed_s"] / rounds,
        )
        cluster = Cluster(
            name="",
            nodes=1,
            devices_per_node=ranks,
            intra_node=link,
            inter_node=link,
            peak_flops_per_s=1.0,
            memory_bandwidth_bytes_per_s=1.0,
        )
        events = [Event(kind="compute", duration_s=network["forward_s"])]
        ready = {bucket[-1]: (number, bucket) for number, bucket in enumerate(plan)}
        for index in reversed(range(10)):
            events.append(Event(kind="compute", duration_s=network["backward_s"][index]))
            if index in ready:
                number, bucket = ready[index]
                events.append(
                    Event(
                        kind="issue",
                        key=str(number),
                        collective="all_reduce",
                        group="all",
                        ranks=(0, 1, 2),
                        nbytes=sum(network["sizes"][i] for i in bucket),
                    )
                )
        events += [Event(kind="wait", key=str(number)) for number in range(len(plan))]
        timeline = simulate(Trace(world_size=ranks, events=[events] * ranks), cluster)
        assert buckets._seconds(network, plan) == pytest.approx(timeline.makespan_s)


def test_the_drawn_networks_leave_room_for_right_answers_and_none_for_wrong_ones():
    for attempt in range(10):
        values = emulated._shape(_draw("prof_efficiency", 3, str(attempt)))
        compute_s = emulated._compute_s(values)
        each = buckets.fill_buckets(values["sizes"], 0.0)
        assert compute_s / emulated._predicted(values, values["plan"]) > 0.92
        assert compute_s / emulated._predicted(values, each) < 0.87
        assert len(values["plan"]) >= 3
        for inputs in buckets.draw_tuning(_draw("prof_bucket_tune", 2, str(attempt))):
            worst = {"25 MB": 0.0, "one": 0.0, "each": 0.0}
            for network in inputs["cases"]:
                sizes = network["sizes"]

                def measure(plan, network=network):
                    return buckets._seconds(network, plan)

                best_s = measure(buckets.best_plan(sizes, measure))
                busy_s = network["forward_s"] + sum(network["backward_s"])
                assert busy_s / best_s > 0.9
                caps = (25 * 2**20, float(sum(sizes)), 0.0)
                for name, cap in zip(worst, caps, strict=True):
                    ratio = measure(buckets.fill_buckets(sizes, cap)) / best_s
                    worst[name] = max(worst[name], ratio)
            assert min(worst.values()) > 1.2 * buckets.SLACK
