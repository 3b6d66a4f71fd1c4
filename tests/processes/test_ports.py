"""A port is nobody else's until it is let go."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections import Counter

import pytest

from minidist.processes import ports
from minidist.processes.ports import free_port, let_go

CODE = """
from minidist.processes.ports import free_port
print(*(free_port() for _ in range(300)), flush=True)
"""


@pytest.fixture(autouse=True)
def narrow(monkeypatch, tmp_path):
    """Hands out ports of a small range."""
    (tmp_path / "range").write_text("10980 60000")
    monkeypatch.setattr(ports, "_RANGE", tmp_path / "range")


def test_no_two_processes_get_the_same():
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"{CODE}\ninput()"],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    try:
        got = Counter(word for process in processes for word in process.stdout.readline().split())
    finally:
        for process in processes:
            process.communicate("\n", timeout=60)
    assert len(got) == 1200
    assert set(got.values()) == {1}


def test_one_that_is_listened_at_is_not_given_and_one_let_go_is_again(monkeypatch):
    monkeypatch.setattr(ports, "_FIRST", 10_979 - ports._TRIES)
    seen = set()
    with socket.create_server(("127.0.0.1", 0)):
        for _ in range(50):
            port = free_port()
            assert port not in seen
            seen.add(port)
            with socket.create_server(("127.0.0.1", port)):
                pass
    for port in seen:
        let_go(port)
    assert ports._held.keys() & seen == set()
    again = {free_port() for _ in range(ports._TRIES // 2)}
    assert again & seen
    for port in again:
        let_go(port)


def test_where_the_system_hands_out_all_of_them(monkeypatch, tmp_path):
    (tmp_path / "range").write_text("1024 65535")
    with socket.create_server(("127.0.0.1", free_port())):
        pass
