"""Judges work on what strangers answer, and come back."""

from __future__ import annotations

import signal
import threading
import time

from autograder.criteria.criterion import Case, Criterion, Finding
from autograder.referee.judging import judge
from minidist.emulate.trace import Trace

CASE = Case(1, [{}], [{}])


def criterion(judge_, between_ranks=False, fault_hint=""):
    return Criterion(
        name="made_up",
        title="made up",
        task="none",
        points=1,
        draw=lambda _: [],
        observe=lambda *_: {},
        judge=judge_,
        between_ranks=between_ranks,
        fault_hint=fault_hint,
    )


def no_judge(_):
    raise AssertionError("was asked")


def test_findings_are_passed_on():
    findings = [Finding("too small", 0)]
    assert judge(criterion(lambda _: findings), CASE) == findings


def test_a_rank_that_is_none_stands_for_all():
    """A judge may count through what an answer has brought, however long that is."""
    found = judge(criterion(lambda _: [Finding("odd", 5), Finding("odder", -1)]), CASE)
    assert found == [Finding("odd"), Finding("odder")]


def test_collectives_that_do_not_match_are_wrong_whatever_the_judge_thinks():
    trace = Trace(world_size=2, events=[[], []], faults=["rank 0 sends", "rank 1 waits"])
    case = Case(2, [{}] * 2, [{}] * 2, trace)
    assert judge(criterion(no_judge), case) == [Finding("rank 0 sends"), Finding("rank 1 waits")]
    [first, _] = judge(criterion(no_judge, fault_hint="One order."), case)
    assert first == Finding("rank 0 sends. One order.")


def test_one_rank_alone_exchanges_nothing():
    assert judge(criterion(no_judge, between_ranks=True), CASE) == []
    two = Case(2, [{}] * 2, [{}] * 2)
    assert judge(criterion(lambda _: [Finding("odd")], between_ranks=True), two) == [Finding("odd")]


def test_an_error_is_a_finding(capsys):
    [finding] = judge(criterion(lambda case: case.answers[0]["sum"]), CASE)
    assert finding.message == "the answer cannot be judged (KeyError: 'sum')"
    assert "KeyError" in capsys.readouterr().err  # for whoever runs the course


def test_a_judge_that_does_not_come_back_is_stopped():
    def judge_(_):
        while True:
            sum(range(1000))

    before = signal.getsignal(signal.SIGPROF)
    [finding] = judge(criterion(judge_), CASE, max_cpu_s=0.2)
    assert finding.message == "the answer cannot be judged: that took more than 0.2 s"
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_waiting_is_not_counted():
    def judge_(_):
        time.sleep(0.5)
        return []

    assert judge(criterion(judge_), CASE, max_cpu_s=0.2) == []


def test_in_other_threads_nothing_is_armed():
    found = []
    thread = threading.Thread(target=lambda: found.append(judge(criterion(lambda _: []), CASE)))
    thread.start()
    thread.join(10)
    assert found == [[]]
