"""Pipeline schedules, the simulator and the programs made from them. Neither torch nor ranks."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.parallel.pipeline import (
    Action,
    Kind,
    Schedule,
    StageTimes,
    check_schedule,
    draw,
    forward_only,
    gpipe,
    interleaved,
    make_program,
    naive,
    one_f_one_b,
    peak_activations,
    pipedream,
    simulate,
    staleness,
    zb_h1,
)
from minidist.parallel.pipeline.program import Exchange, num_messages
from tests.helpers.pipeline_programs import check_program

F, B, W = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
ONE_CHUNK = (naive, gpipe, one_f_one_b, zb_h1, pipedream)


def every_schedule(max_ranks: int, max_micro_batches: int, max_chunks: int):
    for p in range(1, max_ranks + 1):
        for m in range(1, max_micro_batches + 1):
            yield from (build(p, m) for build in ONE_CHUNK)
            for v in range(1, max_chunks + 1):
                yield forward_only(p, m, v)
                if m % p == 0 and v > 1:
                    yield interleaved(p, m, v)


SCHEDULES = list(every_schedule(6, 9, 3))


@st.composite
def times(draw_from, schedule: Schedule):
    seconds = st.integers(1, 9)
    per_stage = st.lists(seconds, min_size=schedule.num_stages, max_size=schedule.num_stages)
    return StageTimes(
        forward_s=draw_from(per_stage),
        backward_s=draw_from(per_stage),
        weight_s=draw_from(per_stage),
        p2p_s=draw_from(st.integers(0, 5)),
    )


# Validity ---------------------------------------------------------------------------------------


def test_every_schedule_is_valid_and_its_program_cannot_deadlock():
    count = 0
    for schedule in SCHEDULES:
        check_schedule(schedule)
        programs = make_program(schedule)
        check_program(programs)
        # The program is the schedule, with every message once at each end.
        sent = [m for r, p in enumerate(programs) for m in messages(p) if m.source == r]
        received = [m for r, p in enumerate(programs) for m in messages(p) if m.target == r]
        assert len(sent) == len(set(sent)) == len(received) == num_messages(schedule)
        assert set(sent) == set(received)
        for rank, program in enumerate(programs):
            actions = tuple(step for step in program if isinstance(step, Action))
            assert actions == schedule.actions[rank]
            # Between two ranks, messages leave in the order in which they are expected.
            for peer in range(schedule.num_ranks):
                out = [m for m in messages(program) if (m.source, m.target) == (rank, peer)]
                come = [m for m in messages(programs[peer]) if (m.source, m.target) == (rank, peer)]
                assert out == come
        count += 1
    assert count == 6 * 9 * (5 + 3) + 2 * (9 + 4 + 3 + 2 + 1 + 1)


def messages(program):
    return [m for step in program if isinstance(step, Exchange) for m in step.messages]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(data=st.data())
def test_timelines_of_unequal_stages_keep_every_promise(data):
    schedule = data.draw(st.sampled_from(SCHEDULES))
    costs = data.draw(times(schedule))
    timeline = simulate(schedule, costs)
    end = {(r, s.action): s.end_s for r, row in enumerate(timeline.spans) for s in row}
    for rank, row in enumerate(timeline.spans):
        assert tuple(span.action for span in row) == schedule.actions[rank]
        for before, after in itertools.pairwise(row):
            assert before.end_s <= after.start_s
        for span in row:
            for other, need in schedule.needs(rank, span.action):
                assert span.start_s >= end[other, need] + (costs.p2p_s if other != rank else 0)
    # No rank can be faster than its own work, and no micro-batch than its way there and back.
    assert timeline.makespan_s >= max(timeline.busy_s(r) for r in range(schedule.num_ranks))
    assert 0 <= timeline.bubble_fraction < 1
    assert draw(timeline).count("\n") == schedule.num_ranks - 1


def edit(schedule: Schedule, rank: int, actions) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(actions)
    return replace(schedule, actions=tuple(rows))


def test_what_is_wrong_with_a_schedule_is_said():
    good = one_f_one_b(2, 2)
    row = good.actions[0]
    with pytest.raises(ValueError, match="rank 0 never runs B1"):
        check_schedule(edit(good, 0, row[:-1]))
    with pytest.raises(ValueError, match="rank 0 has F0 twice"):
        check_schedule(edit(good, 0, (*row, Action(F, 0))))
    with pytest.raises(ValueError, match=r"rank 1 has F2, but there are 2 micro-batches"):
        check_schedule(edit(good, 1, (*good.actions[1], Action(F, 2))))
    with pytest.raises(ValueError, match="rank 0 never runs W0 W1"):
        check_schedule(edit(zb_h1(2, 2), 0, row))
    with pytest.raises(ValueError, match="deadlock: rank 0 at B0 waits for F0 of rank 0"):
        check_schedule(edit(good, 0, [Action(k, i) for i in range(2) for k in (B, F)]))
    crossed = edit(good, 0, [Action(k, i) for i in (0, 1) for k in (F, B)])
    crossed = edit(crossed, 1, [Action(k, i) for i in (1, 0) for k in (F, B)])
    circle = "rank 0 at B0 waits for B0 of rank 1; rank 1 at F1 waits for F1 of rank 0"
    with pytest.raises(ValueError, match=circle):
        check_schedule(crossed)
    with pytest.raises(ValueError, match="actions for each of 3 ranks, got 2"):
        check_schedule(replace(good, num_ranks=3))


def test_arguments_and_rules():
    with pytest.raises(
        ValueError, match=r"a multiple of num_ranks.*got 6 micro-batches on 4 ranks"
    ):
        interleaved(4, 6, 2)
    assert interleaved(4, 6, 1) == one_f_one_b(4, 6)
    for build in ONE_CHUNK:
        with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
            build(0, 4)
        with pytest.raises(ValueError, match="num_micro_batches must be at least 1, got 0"):
            build(2, 0)
    with pytest.raises(
        ValueError, match="forward_s needs one number per stage, 2 for GPipe, got 3"
    ):
        simulate(gpipe(2, 2), StageTimes(forward_s=[1, 2, 3]))
    with pytest.raises(ValueError, match="p2p_s cannot be negative"):
        simulate(gpipe(2, 2), StageTimes(p2p_s=-1))
    with pytest.raises(ValueError, match="weight_s cannot be negative"):
        simulate(gpipe(2, 2), StageTimes(weight_s=[1, -1]))


def test_a_program_with_a_wrong_order_is_caught():
    programs = make_program(one_f_one_b(2, 2))
    exchange, second, *rest = programs[1]
    with pytest.raises(
        ValueError, match=r"deadlock: rank 0 at Exchange\(send F0 to 1\); rank 1 at"
    ):
        check_program((programs[0], (second, exchange, *rest)))
    first, (receive, forward, *rest) = make_program(one_f_one_b(2, 1))
    with pytest.raises(ValueError, match="rank 1 runs F0 before it receives"):
        check_program((first, (forward, receive, *rest)))
    forward, send, *rest = first
    with pytest.raises(ValueError, match="rank 0 sends F0 before it ran"):
        check_program(((send, forward, *rest), (receive, forward, *rest)))


# Published numbers ------------------------------------------------------------------------------


def bubble(schedule: Schedule, f: float, b: float, w: float) -> float:
    v = schedule.num_chunks
    return simulate(schedule, StageTimes(f / v, b / v, w / v)).bubble_fraction


@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (1, 2, 1), (2, 1.5, 0.5), (1, 1, 0)])
def test_bubbles_are_those_of_the_papers(f, b, w):
    for p in range(1, 7):
        assert bubble(naive(p, 3), f, b, w) == pytest.approx((p - 1) / p, abs=1e-12)
        for m in range(1, 13):
            expected = (p - 1) / (m + p - 1)
            assert bubble(gpipe(p, m), f, b, w) == pytest.approx(expected, abs=1e-12)
            assert bubble(one_f_one_b(p, m), f, b, w) == pytest.approx(expected, abs=1e-12)
            assert bubble(pipedream(p, m), f, b, w) == pytest.approx(expected, abs=1e-12)
            for v in (1, 2, 3) if m % p == 0 else ():
                expected = (p - 1) / (v * m + p - 1)
                assert bubble(interleaved(p, m, v), f, b, w) == pytest.approx(expected, abs=1e-12)
            if m >= p:
                idle = (p - 1) * (f + b - w)
                expected = idle / (m * (f + b + w) + idle)
                assert bubble(zb_h1(p, m), f, b, w) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("m", "forward", "backward", "weight", "p2p", "in_1f1b", "in_zb_h1"),
    [
        # arXiv 2401.10241, table 3 to 5: 1.5B model, 8 stages, milliseconds.
        (24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585),
        (32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242),
        (64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674),
    ],
)
def test_profiled_times_give_the_bubble_rates_of_the_zero_bubble_paper(
    m, forward, backward, weight, p2p, in_1f1b, in_zb_h1
):
    costs = StageTimes(forward, backward, weight, p2p_s=p2p)
    ideal = m * (forward + backward + weight)
    for build, expected in ((one_f_one_b, in_1f1b), (zb_h1, in_zb_h1)):
        makespan = simulate(build(8, m), costs).makespan_s
        assert round((makespan - ideal) / makespan, 4) == expected


def test_peak_activations():
    for p in range(1, 7):
        for m in range(1, 10):
            assert peak_activations(naive(p, m)) == (1,) * p
            assert peak_activations(gpipe(p, m)) == (m,) * p
            of_1f1b = tuple(min(p - rank, m) for rank in range(p))
            assert peak_activations(one_f_one_b(p, m)) == of_1f1b
            assert peak_activations(pipedream(p, m)) == of_1f1b
            assert max(peak_activations(zb_h1(p, m))) <= p
            if m >= p:
                assert peak_activations(zb_h1(p, m)) == (p,) * p
            if m % p == 0 and m > p:
                for v in (1, 2, 3):
                    peak = peak_activations(interleaved(p, m, v))
                    # Korthikanti et al., arXiv 2205.05198: p (1 + (p-1) / (p v)) on rank 0
                    expected = p + (p - 1) / v if v > 1 else p
                    assert peak[0] == pytest.approx(expected)


def test_staleness_of_pipedream():
    for p in range(1, 6):
        rows = staleness(pipedream(p, 8))
        assert rows == tuple(tuple(min(i, p - r - 1) for i in range(8)) for r in range(p))
    assert staleness(one_f_one_b(3, 4)) == ((0,) * 4,) * 3


def test_zero_bubble_beats_1f1b_and_interleaving_beats_both_with_enough_chunks():
    assert bubble(zb_h1(4, 8), 1, 1, 1) < bubble(one_f_one_b(4, 8), 1, 1, 1) / 2
    assert bubble(interleaved(4, 8, 3), 1, 1, 1) < bubble(interleaved(4, 8, 2), 1, 1, 1)
    assert num_messages(interleaved(4, 8, 2)) == 2 * 8 * 7  # and v times as many to send
    assert num_messages(one_f_one_b(4, 8)) == 2 * 8 * 3


def test_drawing():
    timeline = simulate(interleaved(2, 2, 2))
    assert draw(timeline).splitlines() == [
        "rank 0 F0-- F1-- F0.1 F1.1           B0.1-----      B1.1----- B0------- B1-------",
        "rank 1      F0-- F1-- F0.1 B0.1----- F1.1 B1.1----- B0------- B1-------",
    ]
    assert all(len(line) <= 7 + 30 for line in draw(timeline, columns=30).splitlines())
    assert draw(replace(timeline, spans=((), ()))) == ""


def test_no_torch_is_needed():
    code = (
        "import sys; from minidist.parallel.pipeline import simulate, gpipe, make_program; "
        "simulate(gpipe(2, 2)); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
