"""The sockets of a rank: the front has one peer on each of its own."""

from __future__ import annotations

import pytest
import zmq
from kernel_helper import place_of_sockets

from minidist.kernel.inside.rank import RankApp

WITHIN_MS = 20_000


@pytest.fixture
def context():
    with zmq.Context() as it:
        yield it
        it.destroy(linger=0)


def test_only_the_shell_of_a_rank_connects_to_the_front(context, monkeypatch):
    """The front deals cells out to its peers in turn: a second peer would get every second cell.

    It had a second one for a moment, the debugger's: on a busy machine a rank missed a cell.
    """
    monkeypatch.setattr(RankApp, "_bind_socket", lambda self, sock, port: port)
    path = f"ipc://{place_of_sockets()}-shell"
    front = context.socket(zmq.DEALER)
    front.bind(path)
    accepted = front.get_monitor_socket(zmq.EVENT_ACCEPTED)
    app = RankApp()
    app.shell_socket = context.socket(zmq.ROUTER)
    app.shell_socket.connect(path)
    app.control_port = 3
    app.init_control(context)
    last = context.socket(zmq.DEALER)  # is accepted after all that have connected before
    last.connect(path)
    last.send(b"here")
    assert front.poll(WITHIN_MS)
    peers = 0
    while accepted.poll(0):
        accepted.recv_multipart()
        peers += 1
    assert peers == 2, "the shell and the last one"
    assert app.shell_socket.getsockopt(zmq.LAST_ENDPOINT) == path.encode()
