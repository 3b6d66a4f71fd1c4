"""A check as a stock grader has it: draw, observe and judge in the process of the accused.

`stock_notebooks.py` copies the part below the line into every check cell (nbgrader) and into every
test file (otter-grader). It uses the draws, observations and judges of our own grader, so that
only the place of the judge differs. What a careful instructor can do inside of a notebook is done:
fresh secret draws in every run, other data on every rank, copies of what is handed to the student's
code, answers of all ranks before anything is judged, a deadline on every wait.
"""

# --- what a check cell holds ---------------------------------------------------------------------


def check(name, subject):
    """Fails with an AssertionError, on every rank, if `subject` does not meet the criterion `name`.

    Collective: all ranks call it. Rank 0 judges and tells the others what it has found.
    """
    import copy
    import json
    import os
    import pickle
    import secrets
    from datetime import timedelta
    from typing import Any

    from autograder.criteria import find_criterion
    from autograder.criteria.criterion import Case, Context
    from autograder.inside import probe
    from autograder.referee.referee import draw_for

    # Draw: rank 0 makes a secret, so all ranks draw the same; each keeps to its own inputs.
    lab, criterion = find_criterion(name)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    nobody: Any = None  # there is no referee to be connected to
    channels = probe._Channels(rank, world_size, nobody, nobody)
    turn = probe._store(channels, 0).add(f"{name}/{rank}", 1)
    case = (
        50 * lab.criteria.index(criterion) + turn
    )  # `_world` meets at `case`, the check beside it
    store = probe._store(channels, -case)
    store.set_timeout(timedelta(seconds=criterion.deadline_s))
    if rank == 0:
        store.set("secret", secrets.token_hex(16))
    draw = draw_for(store.get("secret"), lab.name, name, "stock", world_size)
    inputs = criterion.draw(draw)
    own = copy.deepcopy({k: v for k, v in inputs[rank].items() if not k.startswith("_")})
    plan = criterion.plan(draw) if criterion.plan else None
    emulated = criterion.world == "emulated"
    broker = None
    if emulated:
        broker, channels.broker = _emulator(store, rank, world_size, plan)

    # Observe: every rank leaves its answer, or what went wrong, where rank 0 can read it.
    try:
        with (
            probe._harmless_cuda_calls(),
            probe._world(criterion, case, channels) as (device, client),
        ):
            context = Context(rank, world_size, device, client)
            told = {"answer": criterion.observe(subject, own, context)}
    except Exception as error:
        told = {"error": f"[rank {rank}] {probe.describe_error(error)}"}
    store.set(f"told/{rank}", pickle.dumps(told))

    # Judge.
    if rank == 0:
        try:
            everything = [pickle.loads(store.get(f"told/{r}")) for r in range(world_size)]
            trace = broker.end() if broker else None
            findings = [told["error"] for told in everything if "error" in told]
            if not findings:
                answers = [told["answer"] for told in everything]
                seen = Case(world_size, inputs, answers, trace, plan)
                findings = [finding.message for finding in criterion.findings(seen)]
        except Exception as error:
            findings = [f"cannot be judged: {type(error).__name__}: {error}"]
        store.set("findings", json.dumps(findings))
    findings = json.loads(store.get("findings"))
    if broker:
        broker.close()
    assert not findings, findings[0]


def _emulator(store, rank, world_size, plan):
    """The emulated cluster: its broker (on rank 0; else None) and this rank's connection to it."""
    import os
    import socket
    import tempfile

    from minidist.emulate.broker import Broker

    channel = socket.socket(socket.AF_UNIX)
    if rank != 0:
        channel.connect(store.get("broker").decode())
        channel.sendall(bytes([rank]))
        return None, channel
    path = os.path.join(tempfile.mkdtemp(), "broker")
    broker = Broker(world_size, keep_payloads=True)
    broker.begin(plan)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(world_size)
        listener.settimeout(30.0)
        store.set("broker", path)
        channel.connect(path)
        channel.sendall(bytes([rank]))
        for _ in range(world_size):
            connection, _address = listener.accept()
            broker.attach(connection.recv(1)[0], connection)
    return broker, channel
