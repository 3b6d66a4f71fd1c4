"""The broker against ranks that break the rules. Clients live in threads here; no torch."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import random
import selectors
import signal
import socket
import struct
import termios
import threading
import time

import numpy as np
import pytest

from minidist.emulate import ChargePlan, clusters, simulate
from minidist.emulate.arrays import reduce, values
from minidist.emulate.broker import Broker
from minidist.emulate.client import Client, CollectiveError, CollectiveMismatch
from minidist.emulate.session import Session
from minidist.errors import ProtocolError
from minidist.processes import frames

JOIN_S = 30.0  # no thread of a test waits longer than this


class Ranks:
    """Sockets to a broker, and a way to run one function per rank."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.socks: list[socket.socket] = []
        for rank in range(broker.world_size):
            self.socks.append(socket.socket())
            self.connect(rank)

    def connect(self, rank: int) -> None:
        self.socks[rank].close()
        theirs, self.socks[rank] = socket.socketpair()
        self.broker.attach(rank, theirs)

    def client(self, rank: int) -> Client:
        client = Client(self.socks[rank], rank, self.broker.world_size)
        client.join()
        return client

    def run(self, *functions) -> list:
        """functions[rank](client) in a thread per rank, as one session; errors are results."""
        results: list = [None] * len(functions)

        def work(rank: int) -> None:
            client = None
            try:
                client = self.client(rank)
                results[rank] = functions[rank](client)
            except Exception as error:
                results[rank] = error
            finally:
                if client is not None:
                    client.leave()

        threads = [threading.Thread(target=work, args=(r,)) for r in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
            assert not thread.is_alive(), "a rank hangs"
        return results

    def close(self) -> None:
        self.broker.close()
        for sock in self.socks:
            sock.close()


@contextlib.contextmanager
def cluster_of(world_size: int, **options):
    ranks = Ranks(Broker(world_size, **options))
    try:
        yield ranks
    finally:
        ranks.close()


def all_reduce(client: Client, data, number: int = 0, group: str = "g", members=None) -> np.ndarray:
    array = np.asarray(data, dtype=np.float32)
    members = list(range(client.world_size)) if members is None else members
    header = {"t": "issue", "kind": "all_reduce", "op": "sum", "dtype": "float32"}
    header |= {"shape": list(array.shape), "g": group, "r": members, "k": number}
    client.post(header, memoryview(array.view(np.uint8)))
    _, raw = client.call({"t": "fetch", "key": f"{group}/{number}", "wait": True})
    return raw.view(np.float32)


def reduces(*data, count: int = 1):
    def function(client):
        return [all_reduce(client, data, number).tolist() for number in range(count)]

    return function


def test_sessions_follow_one_another_on_the_same_sockets():
    with cluster_of(3) as ranks:
        for _ in range(20):
            ranks.broker.begin()
            results = ranks.run(*[reduces(1.0 * r, 2.0, count=3) for r in range(3)])
            assert results == [[[3.0, 6.0]] * 3] * 3
            trace = ranks.broker.end()
            assert trace.faults == []
            assert len(trace.collectives) == 3


def test_a_megabyte_goes_round_quickly():
    data = np.ones(1 << 18, dtype=np.float32)

    def work(client):
        times = []
        for number in range(10):
            begin = time.perf_counter()
            all_reduce(client, data, number)
            times.append(time.perf_counter() - begin)
        return min(times)

    with cluster_of(3) as ranks:
        ranks.broker.begin()
        best = ranks.run(work, work, work)
        assert min(best) < 1.0, "a copy too many would not show, but a broken path would"
        assert ranks.broker.end().faults == []


def test_the_result_does_not_depend_on_who_comes_first():
    # Floating-point sums depend on their order: it has to be that of the ranks.
    data = [1e8, 1.0, -1e8]
    expected = ((np.float32(1e8) + np.float32(1)) + np.float32(-1e8)).item()
    orders = [(0, 1, 2), (2, 1, 0), (1, 2, 0)]
    reference = None
    with cluster_of(3) as ranks:
        for order in orders:
            ranks.broker.begin(ChargePlan((0.1,), (0.2,), b"k" * 16))
            turn = [threading.Event() for _ in range(4)]
            turn[0].set()

            def work(client, turn=turn, order=order):
                place = order.index(client.rank)
                assert turn[place].wait(JOIN_S)
                client.charge(0, "forward")
                array = np.asarray([data[client.rank]], dtype=np.float32)
                header = {"t": "issue", "kind": "all_reduce", "op": "sum", "dtype": "float32"}
                header |= {"shape": [1], "g": "g", "r": [0, 1, 2], "k": 0}
                client.post(header, memoryview(array.view(np.uint8)))
                client.call({"t": "poll", "key": "g/0"})  # the broker has it
                turn[place + 1].set()
                _, raw = client.call({"t": "fetch", "key": "g/0", "wait": True})
                return raw.view(np.float32).item()

            assert ranks.run(work, work, work) == [expected] * 3
            trace = ranks.broker.end()
            text = simulate(trace, clusters.laptop(3)).to_json()
            reference = reference or text
            assert text == reference


def test_a_rank_that_never_comes_is_named_at_the_deadline():
    with cluster_of(3, deadline_s=5.0) as ranks:
        ranks.broker.begin()
        done = threading.Event()

        def stays_away(client):
            all_reduce(client, [1.0], 0)
            assert done.wait(JOIN_S)

        def comes(client):
            all_reduce(client, [1.0], 0)
            try:
                all_reduce(client, [1.0, 2.0], 1)
            finally:
                done.set()

        results = ranks.run(comes, stays_away, comes)
        for rank in (0, 2):
            assert isinstance(results[rank], CollectiveError)
            waits = "waited 5 s in all_reduce(float32[2], sum) #1 of the group of all ranks"
            assert waits in str(results[rank])
            expected = "missing: rank 1 has not come to it; its last call was all_reduce(float32[1]"
            assert expected in str(results[rank])
        assert len(ranks.broker.end().faults) == 1


def test_a_rank_that_is_not_even_there_is_named_too():
    with cluster_of(2, deadline_s=0.5) as ranks:
        ranks.broker.begin()
        (result,) = ranks.run(reduces(1.0))
        assert "rank 1 is not connected to this session; it has called nothing" in str(result)


def test_different_calls_are_a_mismatch_on_all_ranks():
    with cluster_of(2) as ranks:
        ranks.broker.begin()
        for result in ranks.run(reduces(1.0), reduces(1.0, 2.0)):
            assert isinstance(result, CollectiveMismatch)
            assert isinstance(result, RuntimeError)
            assert "rank 0 called all_reduce(float32[1], sum)" in str(result)
            assert "rank 1 called all_reduce(float32[2], sum)" in str(result)


def raw_frame(
    header, payload=b"", magic=frames.MAGIC, header_bytes=None, payload_bytes=None
) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    header_bytes = len(text) if header_bytes is None else header_bytes
    payload_bytes = len(payload) if payload_bytes is None else payload_bytes
    return struct.pack(">4sIQ", magic, header_bytes, payload_bytes) + text + payload


GOOD = {
    "t": "issue",
    "kind": "all_reduce",
    "op": "sum",
    "dtype": "float32",
    "shape": [1],
    "g": "g",
    "r": [0, 1],
    "k": 0,
}
FETCH = {"t": "fetch", "q": 1, "key": "g/0", "wait": True}
BAD_HEADERS = {
    "no type": {},
    "unknown type": {"t": "explode"},
    "type of another type": {"t": ["issue"]},
    "unknown collective": GOOD | {"kind": "all_deduce"},
    "collective of another type": GOOD | {"kind": 7},
    "unknown dtype": GOOD | {"dtype": "object"},
    "unknown op": GOOD | {"op": "eval"},
    "op of another type": GOOD | {"op": ["sum"]},
    "negative size": GOOD | {"shape": [-1]},
    "huge size": GOOD | {"shape": [1 << 62]},
    "sizes that overflow": GOOD | {"shape": [1 << 39] * 64},
    "size of another type": GOOD | {"shape": ["1"]},
    "boolean size": GOOD | {"shape": [True]},
    "shape of another type": GOOD | {"shape": 4},
    "too little payload": GOOD | {"shape": [2]},
    "group of another type": GOOD | {"g": 3},
    "no ranks": GOOD | {"r": []},
    "unknown ranks": GOOD | {"r": [0, 1, 99]},
    "negative ranks": GOOD | {"r": [-1, 1]},
    "ranks twice": GOOD | {"r": [1, 1]},
    "not a member": GOOD | {"r": [0]},
    "wrong number": GOOD | {"k": 5},
    "number of another type": GOOD | {"k": None},
    "root outside": GOOD | {"kind": "broadcast", "op": "", "root": 9},
    "no root": GOOD | {"kind": "reduce"},
    "barrier that carries something": GOOD | {"kind": "barrier", "op": "", "shape": [9]},
    "splits of another length": GOOD | {"kind": "all_to_all", "op": "", "send": [1], "recv": [1]},
    "peer outside": GOOD | {"kind": "send", "op": "", "peer": 17, "tag": 0},
    "tag of another type": GOOD | {"kind": "send", "op": "", "peer": 0, "tag": {}},
    "fetch of nothing": {"t": "fetch", "q": 1, "key": "nothing"},
    "fetch without a number": {"t": "fetch", "key": "g/0"},
    "wait of nothing": {"t": "wait", "key": {"a": 1}},
    "layer outside": {"t": "charge", "q": 1, "layer": 9, "dir": "forward"},
    "negative layer": {"t": "charge", "q": 1, "layer": -1, "dir": "forward"},
    "unknown direction": {"t": "charge", "q": 1, "layer": 0, "dir": "up"},
    "stream outside": GOOD | {"st": 1 << 20},
    "stream of another type": GOOD | {"st": "0"},
    "wait for a mark that nobody made": {"t": "after", "e": 1, "st": 1},
    "mark without a number": {"t": "record", "st": 1},
    "own compute in a charged session": {"t": "compute", "ev": [["x", 1, 1, 0]]},
}
BAD_BYTES = {
    "other magic": raw_frame(GOOD, b"1234", magic=b"HTTP"),
    "oversized header": raw_frame(b"{}", header_bytes=1 << 31),
    "oversized payload": raw_frame(GOOD, payload_bytes=1 << 60),
    "not JSON": raw_frame(b"{'a': 1}"),
    "not UTF-8": raw_frame(b"\xff\xfe\xfd"),
    "not an object": raw_frame(b"[1, 2]"),
    "nan": raw_frame(b'{"t": NaN}'),
    "deeply nested": raw_frame(b"[" * 100_000 + b"]" * 100_000),
    "huge integer": raw_frame(b'{"t": ' + b"9" * 10_000 + b"}"),
    "truncated": raw_frame(GOOD, b"12")[:-1] + b"",
}


def attack(ranks: Ranks, data: bytes, hang_up: bool) -> tuple[list, list[str]]:
    """Rank 1 joins and sends `data` as it is, while rank 0 waits for it."""

    def honest(client):
        return all_reduce(client, [1.0], 0, members=[0, 1])

    def evil(client):
        session = str(client.session).encode()
        ranks.socks[1].sendall(data.replace(b'"SESSION"', session))
        if hang_up:
            ranks.socks[1].shutdown(socket.SHUT_RDWR)
        assert waiting.wait(JOIN_S)

    waiting = threading.Event()

    def honest_then_tell(client):
        try:
            return honest(client)
        finally:
            waiting.set()

    ranks.broker.begin(ChargePlan((1.0,), (1.0,), b"s" * 16))
    results = ranks.run(honest_then_tell, evil)
    return results, ranks.broker.end().faults


def test_malformed_frames_are_faults_that_name_the_rank():
    with cluster_of(2, deadline_s=20.0) as ranks:
        cases = {
            # Numbers of other lengths would change the frame: fill the session in before.
            name: lambda s, h=header: raw_frame(h | {"s": s}, b"1234" if "kind" in h else b"")
            for name, header in BAD_HEADERS.items()
        }
        cases |= {name: lambda s, d=data: d for name, data in BAD_BYTES.items()}
        for number, (name, make) in enumerate(cases.items(), 1):
            data = make(number)
            if name == "truncated":
                data = raw_frame(GOOD | {"s": number}, b"1234")[:-2]
            results, faults = attack(ranks, data, hang_up=name == "truncated")
            assert isinstance(results[0], CollectiveError), (name, results)
            assert "rank 1 is lost" in str(results[0]), (name, results)
            assert len(faults) >= 1, name
            assert all("rank 1" in fault for fault in faults), (name, faults)
            assert ranks.broker.attached() == [0], name
            # The broker lives on: with a fresh socket for rank 1 all is well.
            ranks.connect(1)
        ranks.broker.begin()
        assert ranks.run(reduces(1.0), reduces(2.0)) == [[[3.0]], [[3.0]]]
        assert ranks.broker.end().faults == []


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_do_not_break_the_broker(seed):
    draw = random.Random(seed)
    with cluster_of(2, deadline_s=20.0) as ranks:
        for _ in range(15):
            ranks.broker.begin()
            good = bytearray(raw_frame(GOOD | {"s": 1}, b"1234") + raw_frame(FETCH | {"s": 1}))
            for _ in range(draw.randrange(1, 8)):
                good[draw.randrange(len(good))] = draw.randrange(256)
            with contextlib.suppress(OSError):
                ranks.socks[1].sendall(bytes(good[: draw.randrange(1, len(good) + 1)]))
                ranks.socks[1].shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + JOIN_S
            while 1 in ranks.broker.attached() and time.monotonic() < deadline:
                time.sleep(0.002)
            assert ranks.broker.attached() == [0]
            ranks.connect(1)
        ranks.broker.begin()
        assert ranks.run(reduces(1.0), reduces(2.0)) == [[[3.0]], [[3.0]]]
        assert ranks.broker.end().faults == []


SEND = GOOD | {"kind": "send", "op": "", "peer": 0, "tag": 0, "s": 1}
FETCH_SENT = FETCH | {"key": "g/1>0/0/0", "s": 1}
RECEIVE = GOOD | {"kind": "recv", "op": "", "peer": 0, "tag": 0, "s": 1}
MEETS = [
    raw_frame(RECEIVE),
    raw_frame(FETCH | {"key": "g/0>1/0/0", "s": 1}),
    raw_frame(GOOD | {"g": "g/0>1/0", "s": 1}, b"1234"),
]
TWICE = [
    raw_frame(GOOD | {"s": 1, "g": "h"}, b"1234"),
    *[raw_frame(FETCH | {"s": 1, "key": "h/0"})] * 2,
]


@pytest.mark.parametrize(
    ("frames", "fault"),
    [
        ([raw_frame(SEND, b"1234"), raw_frame(FETCH_SENT)], "which it has sent itself"),
        (TWICE, "unanswered yet"),
        (MEETS, "named a group so that"),
    ],
)
def test_a_result_that_cannot_come_is_not_waited_for(frames, fault):
    """At the deadline, the first of them would otherwise have nobody to name."""
    with cluster_of(2, deadline_s=20.0) as ranks:
        results, faults = attack(ranks, b"".join(frames), hang_up=False)
        assert "rank 1 is lost" in str(results[0])
        assert fault in faults[0]
        ranks.connect(1)
        ranks.broker.begin()
        assert ranks.run(reduces(1.0), reduces(2.0)) == [[[3.0]], [[3.0]]]
        assert ranks.broker.end().faults == []


def test_an_error_of_ours_ends_the_session_but_not_the_broker(monkeypatch):
    def fails(session, now_s):
        raise KeyError("ours")

    with cluster_of(2, deadline_s=20.0) as ranks:
        ranks.broker.begin()
        with monkeypatch.context() as patched:
            patched.setattr("minidist.emulate.session.Session.check_deadline", fails)
            told = threading.Event()

            def first(client):
                try:
                    return reduces(1.0)(client)
                finally:
                    told.set()

            results = ranks.run(first, lambda client: told.wait(10))  # it does not leave before
        assert isinstance(results[0], CollectiveError)
        assert "could not be checked: KeyError" in ranks.broker.end().faults[0]
        ranks.broker.begin()
        assert ranks.run(reduces(1.0), reduces(2.0)) == [[[3.0]], [[3.0]]]
        assert ranks.broker.end().faults == []


def test_a_session_keeps_so_many_faults_and_no_more():
    """A rank may connect again and send another broken frame for as long as a check lasts."""
    session = Session(
        1, 2, None, lambda *_: None, keep_payloads=True, deadline_s=1.0, max_bytes=1 << 20
    )
    for number in range(1000):
        session.fail("protocol", f"broken frame {number}")
    assert session.faults == [f"broken frame {number}" for number in range(100)]


@pytest.mark.parametrize("seed", range(5))
def test_no_frame_breaks_a_session(seed):
    """Whatever frames say, they are obeyed or refused; the trace and the deadline can be had."""
    draw = random.Random(seed)
    odd = [None, -1, 0, 1, 1 << 70, "0", "g/0", "g/1>0/0/0", "g/0>1/0", [], [0, 1], [1, 0], {}]
    kinds = ["issue", "fetch", "wait", "poll", "record", "after", "charge", "compute", "leave"]
    calls = ["all_reduce", "all_to_all", "barrier", "broadcast", "send", "recv", "all_gather"]
    for _ in range(60):
        plan = draw.choice([None, ChargePlan((1.0,), (1.0,), b"s" * 16)])
        session = Session(
            1, 2, plan, lambda *_: None, keep_payloads=True, deadline_s=0.0, max_bytes=1 << 20
        )
        for _ in range(60):
            kind = draw.choice(calls)
            header = GOOD | {"t": draw.choice(["issue", *kinds]), "kind": kind, "q": 1, "e": 0}
            header |= {"op": "sum" if kind == "all_reduce" else "", "root": 0, "tag": 0}
            header |= {"peer": draw.randrange(2), "send": [1, 0], "recv": [1, 0], "st": 0}
            header |= {"key": draw.choice(["g/0", "g/1", "g/0>1/0/0", "g/1>0/0/0", "g/0>0/0/0"])}
            header |= {"layer": 0, "dir": "forward", "ev": [["x", 1, 1, 0]], "k": draw.randrange(3)}
            if draw.random() < 0.3:
                header[draw.choice(list(header))] = draw.choice(odd)
            size = 4 if kind not in ("barrier", "recv") and header["t"] == "issue" else 0
            with contextlib.suppress(ProtocolError):
                session.handle(draw.randrange(2), header, np.zeros(size, np.uint8))
        session.check_deadline(time.monotonic() + 1)
        assert session.trace().world_size == 2


def test_a_rank_that_does_not_read_its_replies_is_not_listened_to():
    with cluster_of(1, deadline_s=20.0) as ranks:
        ranks.broker.begin()
        flood, sock = raw_frame({"t": "poll", "s": -1, "q": 1}) * 1000, ranks.socks[0]
        sock.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            while True:
                sock.sendall(flood)
        [connection] = ranks.broker._connections.values()
        assert len(connection.outgoing) < 2000
        sock.setblocking(False)
        ends_at = time.monotonic() + JOIN_S
        while connection.outgoing and time.monotonic() < ends_at:  # it reads, and is heard again
            with contextlib.suppress(BlockingIOError):
                sock.recv(1 << 20)
        assert connection.mask == selectors.EVENT_READ


def test_limits_on_bytes_of_a_session():
    with cluster_of(2, max_session_bytes=100, deadline_s=20.0) as ranks:
        ranks.broker.begin()
        results = ranks.run(*[reduces(*range(10), count=5)] * 2)
        assert all(isinstance(result, CollectiveError) for result in results)
        assert "more than 100 bytes" in ranks.broker.end().faults[0]


def test_frames_of_an_old_session_do_not_reach_the_new_one():
    with cluster_of(2, deadline_s=20.0) as ranks:
        ranks.broker.begin()
        old = [ranks.client(0), ranks.client(1)]
        array = np.asarray([100.0], dtype=np.float32)
        stale = {"t": "issue", "kind": "all_reduce", "op": "sum", "dtype": "float32"}
        stale |= {"shape": [1], "g": "g", "r": [0, 1], "k": 0}
        result: list = []

        def wait_in_the_old_session():
            try:
                result.append(all_reduce(old[0], [100.0]))
            except CollectiveError as error:
                result.append(error)

        waiter = threading.Thread(target=wait_in_the_old_session)
        waiter.start()
        wait_until_asked(ranks)
        # The broken session is over; rank 0 still waits in it and is released.
        ranks.broker.begin()
        waiter.join(JOIN_S)
        assert not waiter.is_alive()
        assert "a new session has begun" in str(result[0])
        # Late frames of both ranks arrive in the new session, garbage in content or not.
        for client in old:
            client.post(stale, memoryview(array.view(np.uint8)))
            client.post({"t": "wait", "key": "whatever"})
            with pytest.raises(CollectiveError, match="this session has ended"):
                client.call({"t": "fetch", "key": "g/0", "wait": True})
            client.leave()
        assert ranks.run(reduces(1.0), reduces(2.0)) == [[[3.0]], [[3.0]]]
        trace = ranks.broker.end()
        assert trace.faults == []
        assert len(trace.collectives) == 1
        assert [len(events) for events in trace.events] == [2, 2]


def test_a_dead_rank_is_a_fault_and_can_be_replaced():
    with cluster_of(3, deadline_s=20.0) as ranks:
        ranks.broker.begin()
        results = ranks.run(
            reduces(1.0), lambda client: ranks.socks[1].shutdown(socket.SHUT_RDWR), reduces(1.0)
        )
        for rank in (0, 2):
            assert "rank 1 is lost: it closed its connection" in str(results[rank])
        assert len(ranks.broker.end().faults) == 1
        ranks.connect(1)
        ranks.broker.begin()
        assert ranks.run(*[reduces(1.0)] * 3) == [[[3.0]]] * 3


def test_the_broker_does_not_wait_for_a_rank_that_does_not_read():
    big = np.zeros(1 << 20, dtype=np.float32)  # more than a socket holds
    with cluster_of(2, deadline_s=20.0) as ranks:
        ranks.broker.begin()
        release = threading.Event()

        def deaf(client):
            header = GOOD | {"shape": [1 << 20]}
            client.post(header, memoryview(big.view(np.uint8)))
            client.post({"t": "fetch", "q": 1, "key": "g/0", "wait": True})
            assert release.wait(JOIN_S)

        def good(client):
            try:
                all_reduce(client, big, 0)
                # A group of its own must be served although the reply to rank 1 is stuck.
                return all_reduce(client, [5.0], 0, group="alone", members=[0]).tolist()
            finally:
                release.set()

        assert ranks.run(good, deaf)[0] == [5.0]


def wait_until_asked(ranks) -> None:
    """Until the broker knows of a rank that waits for a result."""
    ends_at = time.monotonic() + 60
    while not (ranks.broker._session and ranks.broker._session._waiting):
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def interrupt_main() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_an_interrupt_while_waiting_ends_the_session_but_not_the_connection():
    with cluster_of(2, deadline_s=20.0) as ranks:
        ranks.broker.begin()
        client, other = ranks.client(0), ranks.client(1)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            timer = threading.Thread(target=lambda: (wait_until_asked(ranks), interrupt_main()))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                all_reduce(client, [1.0])
            timer.join()
        finally:
            signal.signal(signal.SIGINT, before)
        with pytest.raises(CollectiveError, match="interrupted by KeyboardInterrupt"):
            all_reduce(client, [1.0], 1)
        # Its answer comes late, and must not be taken for one to something else.
        assert all_reduce(other, [1.0]).tolist() == [2.0]
        client.leave()
        other.leave()
        with pytest.raises(CollectiveError, match="cannot be used any more"):
            all_reduce(client, [1.0], 1)
        ranks.broker.end()
        ranks.broker.begin()
        assert ranks.run(reduces(1.0), reduces(2.0)) == [[[3.0]], [[3.0]]]


@pytest.mark.parametrize("part", ["prefix", "payload"])
def test_an_interrupt_in_the_midst_of_a_frame_breaks_the_socket_for_good(part):
    theirs, ours = socket.socketpair()
    answer = raw_frame({"q": 0, "s": 1, "world_size": 1, "deadline_s": 9, "charged": False})
    client = Client(ours, 0, 1)

    def respond():
        length, _ = frames.unpack_prefix(theirs.recv(16, socket.MSG_WAITALL))
        request = json.loads(theirs.recv(length, socket.MSG_WAITALL))
        data = raw_frame(json.loads(answer[16:]) | {"q": request["q"]}, b"x" * 100)
        theirs.sendall(data[: 7 if part == "prefix" else -20])
        unread = array.array("i", [1])
        while unread[0]:
            fcntl.ioctl(ours, termios.FIONREAD, unread)
            time.sleep(0.01)
        interrupt_main()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread = threading.Thread(target=respond)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            client.join()
        thread.join(JOIN_S)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(CollectiveError, match="connection broke while receiving"):
        client.charge(0, "forward")
    with pytest.raises(CollectiveError, match="fresh ranks are needed"):
        Client(ours, 0, 1).join()
    theirs.close()


def test_threads_of_one_rank_share_the_connection():
    def work(client):
        groups = [f"g{i}" for i in range(6)]
        if client.rank == 1:
            groups.reverse()
        out = {}

        def one(group):
            out[group] = [all_reduce(client, [k], k, group).item() for k in range(10)]

        threads = [threading.Thread(target=one, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
        return out

    with cluster_of(2) as ranks:
        ranks.broker.begin()
        expected = {f"g{i}": [2.0 * k for k in range(10)] for i in range(6)}
        assert ranks.run(work, work) == [expected, expected]


def test_no_session_no_second_join_no_second_close():
    with cluster_of(1) as ranks:
        with pytest.raises(CollectiveError, match="no session has begun"):
            ranks.client(0)
        with pytest.raises(ValueError, match="no session has begun"):
            ranks.broker.end()
        ranks.broker.begin()
        ranks.client(0).leave()
        with pytest.raises(CollectiveError, match="already been in this session"):
            ranks.client(0)
        with pytest.raises(ValueError, match="rank 4"):
            ranks.broker.attach(4, ranks.socks[0])
        ranks.broker.close()
    with pytest.raises(ValueError, match="at least 1"):
        Broker(0)


def test_reductions_of_bfloat16_round_like_hardware():
    draw = np.random.default_rng(0)
    floats = draw.standard_normal((3, 1000)).astype(np.float32)
    raws = [(row.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) for row in floats]
    total = sum(values(raw, "bfloat16").astype(np.float64) for raw in raws)
    got = values(reduce(raws, "sum", "bfloat16"), "bfloat16")
    assert np.all(np.abs(got - total) <= np.abs(total) * 2**-8 + 1e-30)
    nan = np.full(2, np.nan, dtype=np.float32).view(np.uint32) >> 16
    assert np.isnan(
        values(reduce([nan.astype(np.uint16).view(np.uint8)] * 2, "sum", "bfloat16"), "bfloat16")
    ).all()
