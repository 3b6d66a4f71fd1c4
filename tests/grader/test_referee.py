"""The referee against ranks that follow the rules, and ranks that do not."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest
from referee_client import answer, ask, dial

from autograder.criteria import get_lab
from autograder.criteria.criterion import Status
from autograder.inside.messages import Message, receive, send
from autograder.referee.practice import PracticeReferee
from autograder.referee.referee import Referee, draw_for
from minidist.emulate.client import Client
from minidist.errors import DeadlineError, ProtocolError

LAB = get_lab("lab1_ddp")
SETUP, SCALING = LAB["setup"], LAB["ddp_scaling"]
N = 3


def draw(criterion):
    return draw_for(b"key", LAB.name, criterion.name, "attempt", N)


@pytest.fixture
def referee(tmp_path, request):
    """One that grades; a test may ask for the one at a student's desk."""
    referee = getattr(request, "param", Referee)(tmp_path / "s", N, draw)
    yield referee
    referee.stop()
    assert not referee.path.exists()


def honest(rank, total):
    fields = {"rank": rank, "world_size": N, "device": "cpu", "backend": "gloo"}
    fields |= {"same_group": True, "left": True}
    return fields, {"sum": total}


def ask_all(referee):
    """Every rank connects and asks; their sockets, and the sum that is right."""
    referee.open(SETUP)
    ranks = [dial(referee, rank)[0] for rank in range(N)]
    values = [ask(sock).arrays["value"] for sock in ranks]
    return ranks, np.sum(values, axis=0)


def test_a_right_answer_from_every_rank_passes(referee):
    ranks, total = ask_all(referee)
    for rank, sock in enumerate(ranks):
        reply = answer(sock, *honest(rank, total))
        assert (reply.kind, reply.fields, reply.arrays) == ("noted", {}, {})  # nothing is told
    verdict = referee.close(Status.NOT_RUN)
    assert (verdict.status, verdict.points) == (Status.PASS, 5)


@pytest.mark.parametrize("wrong", [np.zeros(5), np.full(5, np.nan), np.zeros(4), np.zeros(5, bool)])
def test_one_wrong_rank_is_named(referee, wrong):
    ranks, total = ask_all(referee)
    for rank, sock in enumerate(ranks):
        answer(sock, *honest(rank, wrong if rank == 1 else total))
    verdict = referee.close(Status.NOT_RUN)
    assert verdict.ranks == (Status.PASS, Status.WRONG, Status.PASS)
    assert verdict.points == 0
    assert verdict.message.startswith("[rank 1]")


def test_a_rank_that_claims_to_have_passed_has_not(referee):
    ranks, total = ask_all(referee)
    for rank, sock in enumerate(ranks):
        fields = honest(rank, total)[0] | {"status": "PASS", "points": 100, "verdict": "PASS"}
        answer(sock, fields, {})
    assert referee.close(Status.NOT_RUN).points == 0


def test_silence_scores_nothing_and_says_why(referee):
    ranks, total = ask_all(referee)
    answer(ranks[0], *honest(0, total))
    verdict = referee.close(Status.TIMEOUT, "rank 1 waits in all_reduce", {2: Status.RANK_LOST})
    assert verdict.ranks == (Status.PASS, Status.TIMEOUT, Status.RANK_LOST)
    assert verdict.status == Status.RANK_LOST
    assert "waits in all_reduce" in verdict.message


@pytest.mark.parametrize("said", ["boom", "[rank 2] boom"])
def test_an_error_is_the_students(referee, said):
    ranks, total = ask_all(referee)
    for rank, sock in enumerate(ranks):
        if rank == 2:
            told = {"criterion": "setup", "status": "error", "message": f"ValueError: {said}"}
            send(sock, Message("answer", told))
            receive(sock)
        else:
            answer(sock, *honest(rank, total))
    verdict = referee.close(Status.NOT_RUN)
    assert verdict.status == Status.STUDENT_ERROR
    assert verdict.message == "[rank 2] ValueError: boom"


@pytest.mark.parametrize("referee", [PracticeReferee], indirect=True)
@pytest.mark.parametrize("connected", [True, False])
def test_practice_waits_for_a_rank_that_is_late(referee, connected):
    """A plain script has no kernel that connects every rank before the first check."""
    total = np.sum([inputs["value"] for inputs in SETUP.draw(draw(SETUP))], axis=0)
    ranks, replies = {}, []

    def rank_comes(rank):
        ranks[rank] = ranks.get(rank) or dial(referee, rank)[0]
        ask(ranks[rank])
        replies.append((rank, answer(ranks[rank], *honest(rank, total)).kind))

    if connected:
        ranks.update({rank: dial(referee, rank)[0] for rank in range(N)})
    threads = [threading.Thread(target=rank_comes, args=(rank,)) for rank in range(N)]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
        assert not replies or thread is threads[-1]
    for thread in threads:
        thread.join(20)
    assert sorted(replies) == [(0, "verdict"), (1, "noted"), (2, "noted")]


@pytest.mark.parametrize("referee", [PracticeReferee], indirect=True)
def test_practice_does_not_wait_for_a_rank_that_left(referee):
    ranks = [dial(referee, rank)[0] for rank in range(N)]
    for sock in ranks[:2]:
        ask(sock)
    ranks[1].close()
    started = time.monotonic()
    verdict = answer(ranks[0], *honest(0, np.zeros(5)))
    assert verdict.fields["status"] == "TIMEOUT"
    assert verdict.fields["message"] == "ranks 1, 2: no answer before the deadline"
    assert time.monotonic() - started < 5  # the deadline is 25 s


def test_only_the_open_check_can_be_asked_for_and_only_once(referee):
    sock, _ = dial(referee, 0)
    assert ask(sock).kind == "refused"
    referee.open(SETUP)
    assert ask(sock, "ddp_gradients").kind == "refused"
    assert ask(sock).kind == "inputs"
    assert ask(sock).kind == "refused"


def test_the_first_answer_counts(referee):
    ranks, total = ask_all(referee)
    for rank, sock in enumerate(ranks):
        answer(sock, *honest(rank, total * 0))
        answer(sock, *honest(rank, total))
    assert referee.close(Status.NOT_RUN).status == Status.WRONG


def test_an_answer_without_having_asked_does_not_count(referee):
    referee.open(SETUP)
    sock, _ = dial(referee, 0)
    answer(sock, *honest(0, np.zeros(5)))
    assert referee.close(Status.NOT_RUN).ranks[0] == Status.NOT_RUN


def test_a_rank_connects_once(referee):
    first, welcome = dial(referee, 1)
    assert welcome.kind == "welcome"
    _, refused = dial(referee, 1)
    assert refused.kind == "refused"
    assert "already connected" in refused.fields["why"]
    first.close()


@pytest.mark.parametrize("rank", [-1, N, "0", None, True, 1.0, [0]])
def test_there_are_no_other_ranks(referee, rank):
    assert dial(referee, rank)[1].kind == "refused"


def test_garbage_harms_nobody_else(referee):
    for noise in (b"", b"GET / HTTP/1.0\r\n\r\n" * 10, b"AGW1" + b"\xff" * 64):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(referee.path))
            sock.sendall(noise)
    ranks, total = ask_all(referee)
    ranks[0].sendall(b"\0" * 500)
    with pytest.raises((ProtocolError, DeadlineError, OSError)):
        receive(ranks[0])
    for rank in (1, 2):
        answer(ranks[rank], *honest(rank, total))
    verdict = referee.close(Status.NOT_RUN)
    assert verdict.ranks == (Status.NOT_RUN, Status.PASS, Status.PASS)


def test_fresh_ranks_reach_the_emulated_cluster_every_time(referee):
    """New sockets get the numbers of the old ones; the broker must not mistake them."""
    for _ in range(30):
        sockets = [dial(referee, rank, "broker")[0] for rank in range(N)]
        deadline = time.monotonic() + 20
        while len(referee.broker.attached()) < N:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        referee.open(SCALING)
        clients = [Client(sock, rank, N) for rank, sock in enumerate(sockets)]
        threads = [threading.Thread(target=client.join, daemon=True) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert [client.charged for client in clients] == [True] * N
        referee.close(Status.NOT_RUN)
        referee.new_ranks()


def test_who_connects_in_a_dead_ranks_name_does_not_keep_the_next_one_out(referee):
    referee.new_ranks()
    late = [dial(referee, rank, "broker")[0] for rank in range(N)]  # of the old generation
    ends_at = time.monotonic() + 60
    while len(referee.broker.attached()) < N:  # a welcome is sent before
        assert time.monotonic() < ends_at
        time.sleep(0.001)
    for sock in late:
        sock.close()
    while referee.broker.attached():
        assert time.monotonic() < ends_at
        time.sleep(0.001)
    for rank in range(N):
        sock, said = dial(referee, rank, "broker")
        assert said.kind == "welcome"
        sock.close()


def test_draws_depend_on_key_criterion_attempt_and_rank():
    def numbers(key=b"k", criterion="c", attempt="a", world_size=3, rank=0):
        return tuple(draw_for(key, "lab", criterion, attempt, world_size).private(rank).random(4))

    others = [
        numbers(key=b"l"),
        numbers(criterion="d"),
        numbers(attempt="b"),
        numbers(world_size=4),
        numbers(rank=1),
    ]
    assert numbers() == numbers()
    assert len({numbers(), *others}) == 6
