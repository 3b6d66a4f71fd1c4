"""One notebook on two nodes: cells, hangs, deaths, strangers, and two separate networks."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
import zmq
from kernel_helper import (
    ALL_REDUCE,
    HANGS_S,
    JOIN,
    SETUP,
    Kernel,
    Result,
    alive,
    says_now,
    wait_gone,
)
from nodes_helper import (
    AGENT,
    SECRET,
    Pair,
    Wire,
    environment,
    may_make_networks,
    networks,
    two_nodes,
    wait_until_lost,
)

from minidist import __version__
from minidist.kernel.membership import Keys, MultiNodeJob
from minidist.processes.ports import free_port
from minidist.processes.tree import descendants

LOCAL = MultiNodeJob(num_nodes=2, node=0, host="127.0.0.1", port=1, secret=SECRET)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with two_nodes() as it:
        yield it


@pytest.fixture
def fresh(pair: Pair) -> Kernel:
    """The kernel with two ranks on each node that have joined a group."""
    kernel = pair.kernel
    if not alive(pair.agent.pid) or pair.agent.poll() is not None:
        pair.start_agent()
    status = kernel.request(action="status")
    if status["state"] != "ready" or len(status["ranks"]) != 4:
        kernel.ok("%restart_ranks 4")
    kernel.request(action="deadline", seconds=None)
    kernel.ok(f"{SETUP}\nif not dist.is_initialized(): dist.init_process_group('gloo')")
    return kernel


# -- cells ---------------------------------------------------------------------------------------


def test_a_cell_runs_on_both_nodes(fresh: Kernel) -> None:
    assert fresh.ok(ALL_REDUCE).text() == "10.0\n[ranks 1-3: same output]\n"
    names = ("LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR")
    text = fresh.ok(f"print(rank, *(os.environ[name] for name in {names}), os.getcwd())").text()
    for rank, line in enumerate(
        sorted(line.partition("] ")[2] or line for line in text.splitlines())
    ):
        assert line == f"{rank} {rank % 2} {rank // 2} 2 4 127.0.0.1 {os.getcwd()}"
    assert fresh.ok("%%rank 3\nprint('only', rank)").text() == "only 3\n"
    # The secret is for the kernel, not for what runs in it.
    assert fresh.ok("print([n for n in os.environ if 'SECRET' in n])").text().startswith("[]\n")


def test_an_error_on_another_node_is_named(fresh: Kernel) -> None:
    result = fresh.run("if rank == 3: raise ValueError('boom')")
    assert (result.kind, result.reply["evalue"]) == ("error", "[rank 3] boom")
    assert [result.rank(rank)["status"] for rank in range(4)] == ["ok", "ok", "ok", "error"]


def test_much_output_input_and_figures_of_another_node(fresh: Kernel) -> None:
    text = fresh.ok("%%rank 3\nfor i in range(20_000): print('line', i)").text()
    assert text == "".join(f"line {i}\n" for i in range(20_000))
    shown = fresh.ok("%%rank 2\nfrom IPython.display import HTML\nHTML('<b>x</b>')")
    assert shown.of("execute_result")[0]["data"]["text/html"] == "<b>x</b>"
    typed: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []

    def answer(message: dict[str, Any]) -> None:
        typed.append(message)
        fresh.client.input("seven")

    fresh.client.execute_interactive(
        "print(input('number? '))",
        timeout=HANGS_S,
        allow_stdin=True,
        stdin_hook=answer,
        output_hook=messages.append,
    )
    assert len(typed) == 1
    assert "ranks 1-3: same output" in Result({}, 0, messages).text()


def test_the_table_names_the_nodes(fresh: Kernel) -> None:
    lines = fresh.ok("%ranks").text().splitlines()[1:5]
    for rank, line in enumerate(lines):
        assert line.startswith(f"{rank} on node {rank // 2} (")
        assert "gloo, 4 ranks" in line


# -- hangs, interrupts, other numbers of ranks ---------------------------------------------------


def test_a_hang_is_explained_for_both_nodes(fresh: Kernel) -> None:
    result = fresh.run("if rank != 1: dist.all_reduce(torch.ones(8))")
    assert result.kind == "hang"
    count = result.reply["execution_count"]
    line = f"waits in all_reduce (float32 [8]) at Cell In[{count}], line 1: "
    for rank in (0, 2, 3):
        assert result.rank(rank)["text"].startswith(line)
        assert f"rank {rank}: {line}" in result.reply["evalue"]
    assert result.rank(1)["text"] == "finished the cell after 0 collectives; rank 3 has started 1"
    # Uneven numbers go too, as long as every node has a rank.
    few = fresh.run("%restart_ranks 1")
    assert (few.reply["ename"], few.kind) == ("UsageError", "error")
    assert fresh.request(action="restart", ranks=1)["status"] == "error"
    fresh.ok(f"%restart_ranks 3\n{JOIN}")
    assert (
        fresh.ok(f"{ALL_REDUCE}\nprint(os.environ['LOCAL_WORLD_SIZE'])")
        .text()
        .startswith("6.0\n2\n")
    )


def test_the_deadline_of_a_cell(fresh: Kernel) -> None:
    fresh.request(action="deadline", seconds=15)
    result = fresh.run("if rank != 2: dist.barrier()\nelse:\n    while True: pass")
    assert result.kind == "deadline"
    assert "line 3: while True: pass" in result.rank(2)["text"]


def test_an_interrupt_frees_a_collective(fresh: Kernel) -> None:
    generation = fresh.request(action="status")["generation"]
    for attempt in range(5):
        result = fresh.run(
            f"kept = {attempt}\ndist.barrier()\nif rank == 0: print('now', flush=True)\n"
            "if rank != 3: dist.all_reduce(torch.ones(4))\nelse: time.sleep(1000)",
            stop=says_now,
        )
        assert result.seconds < 20
        assert result.kind == "error", result.reply
        fresh.ok("if not dist.is_initialized(): dist.init_process_group('gloo')")
        text = fresh.ok(f"{ALL_REDUCE}\nprint(kept)").text()
        assert text == f"10.0\n{attempt}\n[ranks 1-3: same output]\n"
        if "destroyed on every rank" in result.text("stderr"):
            break  # else the interrupt came before the collective: once more
    else:
        pytest.fail("no collective was interrupted")
    assert fresh.request(action="status")["generation"] == generation


# -- deaths --------------------------------------------------------------------------------------


def test_a_lost_rank_is_told_with_its_node(fresh: Kernel) -> None:
    result = fresh.run("if rank == 2: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert result.kind == "rank_lost"
    text = f"ended with signal 9 (SIGKILL) on node 1 ({socket.gethostname()})"
    assert result.rank(2) == {"rank": 2, "status": "lost", "text": text}
    assert result.seconds < 10
    result = fresh.run(f"%restart_ranks\n{SETUP}\nif rank == 1: os._exit(5)\ntime.sleep(60)")
    assert "rank 1 ended with exit code 5 on node 0" in result.reply["evalue"]


@pytest.mark.parametrize("who", ["agent", "launcher", "agent, politely"])
def test_a_lost_node_is_told(fresh: Kernel, pair: Pair, who: str) -> None:
    below = descendants(pair.agent.pid)
    assert len(below) == 5  # launcher, fork server, torch's agent, two ranks
    if who == "launcher":
        os.kill(below[0], signal.SIGKILL)
        words = "the launcher of the ranks ended with signal 9 (SIGKILL) on node 1"
    else:
        pair.agent.send_signal(signal.SIGKILL if who == "agent" else signal.SIGTERM)
        words = "node 1"
    assert wait_until_lost(fresh) < 10
    assert words in fresh.run("1").reply["evalue"]
    assert wait_gone(below) == []
    if who != "launcher":
        pair.agent.wait(60)
        pair.start_agent()  # a node may come back
    assert fresh.ok(f"%restart_ranks\n{JOIN}\n{ALL_REDUCE}").text().count("10.0\n") == 1


@pytest.mark.parametrize("who", ["front", "front, politely"])
def test_the_other_node_ends_with_the_front(who: str) -> None:
    with two_nodes() as pair:
        code = "import subprocess; it = subprocess.Popen(['sleep', '1000'], start_new_session=True)"
        pair.kernel.ok(f"{code}\nimport sys; print(sys.stdout.folder)")
        folder = pair.kernel.ok("%%rank 2\nprint(sys.stdout.folder)").text().strip()
        run_dir = pair.kernel.ok(
            "%%rank 2\nimport os; print(os.environ['MINIDIST_RUN_DIR'])"
        ).text()
        family = pair.family()
        assert len(family) == 16  # on each: front or agent, launcher and its two, 2 ranks, 2 sleeps
        if who == "front":
            os.kill(pair.kernel.pid, signal.SIGKILL)
        else:
            pair.kernel.close()
        assert wait_gone(family) == []
        assert pair.agent.wait(60) == (1 if who == "front" else 0)
        assert [Path(path).exists() for path in (folder, run_dir.strip())] == [False, False]


def test_a_good_bye_counts_though_a_connection_was_closed_before_it() -> None:
    port = free_port()
    wire = Wire(port)
    with two_nodes(agent_port=wire.port, port=port) as pair:
        pair.kernel.ok("1")
        wire.cut_newest()
        pair.kernel.close()
        assert pair.agent.wait(60) == 0


@pytest.mark.slow
def test_an_agent_may_stay_for_the_next_kernel() -> None:
    with two_nodes("--stay") as pair:
        pair.kernel.ok("1")
        below = descendants(pair.agent.pid)
        pair.kernel.manager.restart_kernel()
        pair.kernel.client.wait_for_ready(timeout=HANGS_S)
        assert pair.kernel.ok(f"{JOIN}\n{ALL_REDUCE}").text().startswith("10.0\n")
        assert wait_gone(below) == []
        pair.agent.send_signal(signal.SIGTERM)
        assert pair.agent.wait(20) == 128 + signal.SIGTERM


def test_what_travels_is_encrypted_and_a_cut_wire_ends_the_ranks() -> None:
    port = free_port()
    wire = Wire(port)
    with two_nodes(agent_port=wire.port, port=port) as pair:
        text = pair.kernel.ok("print('a text that is ' + 'easy to find')").text()
        assert "ranks 1-3: same output" in text
        below = descendants(pair.agent.pid)
        for word in (b"easy to find", b"execute_request", b'"do"'):
            assert word not in wire.seen
        assert len(wire.seen) > 2000
        wire.cut()
        assert wait_until_lost(pair.kernel) < 10
        assert "node 1" in pair.kernel.run("1").reply["evalue"]
        assert pair.agent.wait(60) == 1
        assert wait_gone(below) == []


# -- strangers -----------------------------------------------------------------------------------


def _client(port: int, keys: Keys | None, identity: bytes) -> zmq.Socket[bytes]:
    sock = zmq.Context.instance().socket(zmq.DEALER)
    sock.linger = 0
    sock.rcvtimeo = sock.sndtimeo = 30_000
    sock.routing_id = identity
    if keys is not None:
        sock.curve_serverkey = keys.front_public
        sock.curve_secretkey, sock.curve_publickey = keys.node, keys.node_public
    sock.connect(f"tcp://127.0.0.1:{port}")
    return sock


def _hello(node: Any = 1, **more: Any) -> bytes:
    return json.dumps({"hello": node, "host": "x", "version": __version__, **more}).encode()


def test_strangers_are_turned_away(fresh: Kernel, pair: Pair) -> None:
    for data in (
        b"\xff" * 1000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\0\0\0\0\0\0\0\1\x7f" + b"0" * 90,
    ):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", pair.port)) as sock,
        ):
            sock.sendall(data)
    wrong = Keys(replace(LOCAL, secret=SECRET + "!"))
    right, other = Keys(LOCAL), Keys(LOCAL)
    wrong.front_public = right.front_public  # knows where, but is nobody
    for keys in (None, wrong):
        line, data = (_client(pair.port, keys, b"stranger" + kind) for kind in (b"L", b"D"))
        line.rcvtimeo = line.sndtimeo = data.sndtimeo = 500
        for sock in (line, data):
            with contextlib.suppress(zmq.Again):  # turned away before it has sent anything
                sock.send(_hello())
        with pytest.raises(zmq.Again):
            line.recv()
        line.close()
        data.close()
    # The right key, and nonsense: whoever has the key is still no more than a node.
    cases = [(_hello(1), "there is a node 1"), (_hello(7), "from 1 to 1"), (_hello(-1), "from 1")]
    cases += [(_hello(1, version="9"), "has 9"), (_hello(0), "from 1 to 1")]
    for number, (hello, words) in enumerate(cases):
        line, data = (
            _client(pair.port, other, b"guest%d" % number + kind) for kind in (b"L", b"D")
        )
        line.send(hello)
        data.send(hello)
        while b"refused" not in (answer := line.recv()):
            assert answer == b"{}"
        assert words in json.loads(answer)["refused"]
        line.close()
        data.close()
    guest = _client(pair.port, right, b"guestL")
    rng = random.Random(5)
    for _ in range(300):
        frames = [rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(1, 7))]
        guest.send_multipart(frames)
    for junk in (b"[" * 5000, b'{"hello": []}', b'{"hello": true}', b"null", _hello("1")):
        guest.send(junk)
    assert fresh.ok(ALL_REDUCE).text().startswith("10.0\n")
    guest.close()


def test_a_node_that_talks_nonsense() -> None:
    """It has the key and the front's confidence, and still speaks for its own ranks only."""
    port = free_port()
    keys = Keys(LOCAL)
    with two_nodes(agent_port=1, port=port) as pair:  # the real agent finds nobody at first
        line, data = (_client(port, keys, b"false" + kind) for kind in (b"L", b"D"))
        line.send(_hello(host="a\nb" * 999))
        data.send(_hello())
        order: dict[str, Any] = {}
        while order.get("do") != "start":
            order = json.loads(line.recv())
        rng = random.Random(7)
        # The first one: `lost` before all were ready, so the start has failed.
        for message in ({"generation": 0, "lost": [], "text": 5}, {"id": 1}, {"id": "x"}, [], 5):
            line.send(json.dumps(message).encode())
        for message in ({"generation": 0, "started": {}}, {"id": 0, "stopped": True}, {"rank": 0}):
            line.send(json.dumps(message).encode())
        line.send(b"\xff\xfe")
        line.send_multipart([b"{}", b"{}"])
        for rank in (b"0", b"2", b"9", b"-1", "٢".encode(), b"x" * 99):
            for channel in (b"shell", b"iopub", b"stdin", b"control", b"other"):
                frames = [rng.randbytes(rng.randrange(50)) for _ in range(rng.randrange(8))]
                data.send_multipart([channel, rank, b"0", *frames])
                data.send_multipart([channel, rank, b"0", b"<IDS|MSG>", *frames])
        # What its ranks answer is theirs to say, and does not take their node away.
        line.send(b'{"id": 0, "answer": {"leaving": true, "refused": "x"}}')
        assert "on node 1 (ababab" in (text := pair.kernel.run("1").reply["evalue"])
        assert "\nb" not in text.partition("Run %restart")[0]
        line.send(b'{"leaving": true}')
        line.close()
        data.close()
        pair.agent.kill()
        pair.agent_port = port
        pair.start_agent()
        said = pair.agents[-1].stderr
        assert said is not None
        assert any("has joined" in line for line in said)
        assert pair.kernel.ok(f"%restart_ranks\n{JOIN}\n{ALL_REDUCE}").text().count("10.0\n") == 1


# -- papermill, and two networks -----------------------------------------------------------------


def _papermill(folder: Path, nodes: list[list[str]], environments: list[dict[str, str]]) -> str:
    """Output of a notebook that the same line has started on each of two nodes."""
    book = nbformat.v4.new_notebook()
    code = f"{JOIN}\n{ALL_REDUCE}\nprint(os.environ['GLOO_SOCKET_IFNAME'])"
    book.cells = [nbformat.v4.new_code_cell(code)]
    nbformat.write(book, folder / "in.ipynb")
    line = [*AGENT, "--", "papermill", "--kernel", "torchrun-auto", "--language", "python"]
    line += [str(folder / "in.ipynb"), str(folder / "out.ipynb")]
    running = [
        subprocess.Popen(node + line, env=env, stderr=subprocess.PIPE, text=True, cwd=folder)
        for node, env in zip(nodes, environments, strict=True)
    ]
    try:
        words = [process.communicate(timeout=HANGS_S)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], words
    outputs = nbformat.read(folder / "out.ipynb", as_version=4).cells[-1].outputs
    return "".join(output.text for output in outputs if output.output_type == "stream")


def test_papermill_on_two_nodes_with_a_secret_in_a_file(tmp_path: Path) -> None:
    port, more = free_port(), {"MINIDIST_SECRET": "", "MINIDIST_SECRET_FILE": str(tmp_path / "key")}
    environments = [environment(node, port, **more) for node in range(2)]
    text = _papermill(tmp_path, [[], []], environments)
    assert text == "10.0\nlo\n[ranks 1-3: same output]\n"
    assert sorted(os.listdir(tmp_path)) == ["in.ipynb", "out.ipynb"]


def test_two_network_namespaces(tmp_path: Path) -> None:
    if not may_make_networks():
        pytest.skip("needs root and network namespaces")
    with networks() as pids:
        nodes = [["nsenter", "-t", str(pid), "-n"] for pid in pids]
        more = {"MINIDIST_ENDPOINT": "10.83.0.1:29500"}
        text = _papermill(tmp_path, nodes, [environment(node, 0, **more) for node in range(2)])
    assert text == "10.0\ncable\n[ranks 1-3: same output]\n"
