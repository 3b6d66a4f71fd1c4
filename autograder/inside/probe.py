"""`check("name", what_you_wrote)`: the same code at the student's desk and in the grader's box.

The probe asks the referee for this rank's inputs, calls the student's code with them and sends back
raw arrays. The probe knows no expected value and cannot say PASS: the referee, which is a separate
process, judges. See [Note: the referee's protocol].

At the student's desk, rank 0 starts a practice referee with public seeds. Under the grader,
`attach()` connects each rank to the referee before any of the student's code runs.
"""

from __future__ import annotations

import functools
import inspect
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

from autograder.criteria.not_started import is_not_started
from autograder.inside.messages import Message, receive, send
from minidist.errors import DeadlineError, MinidistError, ProtocolError

START_DEADLINE_S = 60.0
# The place of an error that no line of the student's code raised.
NOT_IN_STUDENTS_LINES = "in the use of what your code returned or left behind, in no line of yours"
NOT_STARTED = "not started"  # `nbgrader validate` counts a check that says so as failed
NOT_WRITTEN = "not written yet"  # message of a check whose cell is still as it was handed out
REFEREE_SLACK_S = 10.0  # the referee answers a check at most this long after its deadline


class CheckFailed(AssertionError):
    """A check did not pass; the message says what was expected and what the code returned."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows this instead of a traceback through the grader's code.

        `nbgrader validate` cuts long lines off, so they are wrapped, except indented lines (code).
        """
        lines = str(self).split("\n")
        wrap = functools.partial(textwrap.wrap, width=82, break_long_words=False)
        return ["\n".join("\n".join(wrap(x)) if x[:1] > " " else x for x in lines)]


@dataclass
class _Channels:
    """This rank's connections to the referee: one for checks, one for the emulated cluster."""

    rank: int
    world_size: int
    check: socket.socket
    broker: socket.socket


_channels: _Channels | None = None
_base_store: Any = None


def attach() -> None:
    """Connects this rank to the referee; called by the kernel before any user code.

    Without GPUs, cells see the two nodes that checks see: a check may use what a cell has read.

    Raises:
        DeadlineError: there is no referee at the path in MINIDIST_REFEREE.
    """
    import torch

    from autograder.criteria.common.places import two_nodes

    channels = _connect(Path(os.environ["MINIDIST_REFEREE"]))
    if not torch.cuda.device_count():
        os.environ |= two_nodes(channels.rank, channels.world_size)


def check(name: str, subject: Any = None) -> None:
    """Runs the check called `name` on `subject`, on every rank.

    Args:
        name: the criterion, as in the lab's text.
        subject: what the student wrote: a function, a class, or a path.

    Raises:
        CheckFailed: at the student's desk, on rank 0, if the check does not pass.
    """
    __tracebackhide__ = True  # IPython leaves this function out of tracebacks
    from autograder.criteria import find_criterion
    from autograder.criteria.common.places import on_two_nodes
    from autograder.criteria.criterion import Context, HardwareMissingError, split

    _, criterion = find_criterion(name)
    channels = _channels or _connect(_practice_referee())
    asked = _talk(channels, Message("ask", {"criterion": name}), START_DEADLINE_S)
    if asked.kind != "inputs":
        raise ProtocolError(f"check {name!r}: {asked.fields.get('why', asked.kind)}")
    inputs = asked.fields["values"] | asked.arrays
    try:
        with (
            _harmless_cuda_calls(),
            _world(criterion, asked.fields["case"], channels) as (device, broker),
            _standing_in(subject, _ours(criterion.stand_ins, asked.fields["ours"])) as used,
        ):
            context = Context(channels.rank, channels.world_size, device, broker)
            with on_two_nodes(context, subject):
                values = criterion.observe(used, inputs, context)
        answer = Message("answer", {"criterion": name, "status": "ok"})
        answer.fields["values"], answer.arrays = split(values)
    except HardwareMissingError as error:
        answer = Message("answer", {"criterion": name, "status": "blocked", "message": str(error)})
    except BaseException as error:
        said = describe_error(error)[:4000]
        told = {"criterion": name, "status": "error", "message": said}
        _tell(channels, Message("answer", told), criterion.deadline_s)
        if is_not_started(error):
            # No error, so that "Run all" goes on to the tasks that are written. `nbgrader validate`
            # takes a cell with text on stderr for failed.
            title = f"○ {name}  0/{criterion.points:g}  {criterion.title}"
            print(f"{title}\n{NOT_STARTED}, {said}", file=sys.stderr)
            return
        lines = _of_student(error.__traceback__)
        if lines is None and isinstance(error, Exception):
            title = f"✗ {name}  0/{criterion.points:g}  {criterion.title}"
            raise CheckFailed(f"{title}\n{said}\nReread: {criterion.task}.") from None
        raise error.with_traceback(lines) from error.__cause__
    verdict = _tell(channels, answer, criterion.deadline_s)
    if verdict.kind == "verdict":
        _show(verdict.fields)


def _ours(names: tuple[str, ...], source: str) -> dict[str, Any]:
    """The functions of `names` in a source text that the referee sent; none without a text."""
    if not source:
        return {}
    module = types.ModuleType("ours")
    exec(compile(source, "ours.py", "exec"), vars(module))
    return {name: getattr(module, name) for name in names}


@contextmanager
def _standing_in(subject: Any, stand_ins: Mapping[str, Any]) -> Iterator[Any]:
    """Replaces functions of the notebook that `subject` was written in, while a check runs.

    Yields the subject; in a tuple of functions, ours replace the functions of the same names.
    """
    if not stand_ins:
        yield subject
        return
    from autograder.criteria.common.pretending import having

    first = subject[0] if isinstance(subject, tuple) else subject
    names = getattr(inspect.unwrap(first), "__globals__", None)
    names = vars(sys.modules[first.__module__]) if names is None else names
    if isinstance(subject, tuple):
        subject = tuple(stand_ins.get(getattr(f, "__name__", ""), f) for f in subject)
    theirs = {id(names[name]): ours for name, ours in stand_ins.items() if name in names}

    def replaced(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(theirs.get(id(value), value) for value in values)

    with ExitStack() as stack:
        # Defaults and bases were bound when the function or class was defined.
        for function in _functions_in(names):
            if defaults := function.__defaults__:
                stack.enter_context(mock.patch.object(function, "__defaults__", replaced(defaults)))
        for cls in [value for value in names.values() if isinstance(value, type)]:
            if (bases := replaced(cls.__bases__)) != cls.__bases__:
                stack.callback(setattr, cls, "__bases__", cls.__bases__)
                cls.__bases__ = bases
        stack.enter_context(having(names, stand_ins))
        yield subject


def _functions_in(names: Mapping[str, Any]) -> list[Any]:
    """The functions of a namespace that were defined in it, and those of its classes."""
    found = []
    for value in list(names.values()):
        for each in vars(value).values() if isinstance(value, type) else [value]:
            if inspect.isfunction(each) and each.__globals__ is names:
                found.append(each)
    return found


def _tell(channels: _Channels, answer: Message, deadline_s: float) -> Message:
    """Sends the answer; at the desk, the referee replies only when all ranks have answered."""
    return _talk(channels, answer, deadline_s + REFEREE_SLACK_S)


def _talk(channels: _Channels, message: Message, deadline_s: float) -> Message:
    channels.check.settimeout(deadline_s)
    send(channels.check, message)
    return receive(channels.check)


def _show(fields: dict[str, Any]) -> None:
    """Prints a passed or blocked check; raises CheckFailed for any other status."""
    score = f"{fields['points']:g}/{fields['max_points']:g}"
    if fields["status"] == "PASS":
        print(f"✓ {fields['name']}  {score}  {fields['title']}  ({fields['so_far']})")
        return
    if fields["status"] == "BLOCKED":
        print(
            f"○ {fields['name']}  +{fields['max_points']:g} extra  {fields['title']}: not here. "
            f"{fields['message']}"
        )
        return
    raise CheckFailed(
        f"✗ {fields['name']}  {score}  {fields['title']}\n{fields['message']}\n"
        f"Reread: {fields['task']}."
    )


def describe_error(error: BaseException) -> str:
    """The exception, and the innermost line of the student's code that led to it."""
    place, frames = "", traceback.extract_tb(error.__traceback__)
    for frame in frames:
        if _is_students(frame.filename):
            cell = _cell_name(frame.filename)
            place = f" ({cell or frame.filename}, line {frame.lineno}: {frame.line})"
    told = frames and (frames[-1].line or "").startswith("raise ")  # such an error explains itself
    if not place and not told and not (isinstance(error, MinidistError) or is_not_started(error)):
        place = f" ({NOT_IN_STUDENTS_LINES})"
    if is_not_started(error):
        return f"{NOT_WRITTEN}{place}"
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{place}{notes}"


def _is_students(filename: str) -> bool:
    return _cell_name(filename) is not None or filename.endswith("lab.py")


def _of_student(frames: TracebackType | None) -> TracebackType | None:
    """The student's own lines of a traceback; None if it leads through none of them."""
    theirs: list[TracebackType] = []
    while frames is not None:
        if _is_students(frames.tb_frame.f_code.co_filename):
            theirs.append(frames)
        frames = frames.tb_next
    for entry, inner in zip(theirs, [*theirs[1:], None], strict=False):
        entry.tb_next = inner
    return theirs[0] if theirs else None


def _cell_name(filename: str) -> str | None:
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    named = shell.compile.format_code_name(filename) if shell else None
    return " ".join(named) if named else None


@contextmanager
def _world(criterion: Any, case: int, channels: _Channels) -> Iterator[tuple[Any, Any]]:
    """Makes the criterion's process group torch's default group; yields device and broker.

    Raises:
        HardwareMissingError: the criterion needs a GPU that this rank cannot have.
    """
    import torch

    from minidist import device as devices

    kind = criterion.world
    if kind == "emulated":
        from minidist.emulate.backend import emulated_world

        with emulated_world(channels.broker, channels.rank, channels.world_size) as broker:
            yield torch.device("cpu"), broker
        return
    device = devices.choose_device() if not criterion.extra else _own_gpu(criterion.needs)
    if kind in ("own", "none"):
        yield device, None
        return
    from minidist.launch import isolated_world

    # Each check gets a new group, which is never destroyed: a collective that a wrong submission
    # left pending cannot match a collective of the next check.
    with isolated_world(
        devices.choose_backend(),
        store=_store(channels, case),
        rank=channels.rank,
        world_size=channels.world_size,
        base=10_000 * (case + 1),
    ):
        yield device, None


def _own_gpu(needs: str) -> Any:
    """The GPU of this rank for a criterion with extra points; ranks may have to share a GPU.

    Raises:
        HardwareMissingError: there is no GPU that works, or the criterion needs one GPU per rank
            and there are fewer.
    """
    import torch

    from autograder.criteria.criterion import HardwareMissingError

    count = torch.cuda.device_count() if _cuda_works() else 0
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if needs == "cuda per rank" else 1
    if count < wanted:
        raise HardwareMissingError(
            f"It needs {wanted} CUDA device{'s' * (wanted > 1)}; torch sees {count or 'none'}."
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % count)
    try:
        torch.cuda.set_device(device)
        torch.empty(1, device=device)
    except RuntimeError as error:  # e.g. the GPU takes one process only, and has one already
        said = str(error).partition("\n")[0]
        raise HardwareMissingError(f"It needs a GPU that works; {device}: {said}.") from None
    return device


@functools.cache
def _cuda_works() -> bool:
    """Whether CUDA initialises; a driver that counts devices is not enough."""
    import torch

    try:
        if torch.cuda.is_available():
            torch.cuda.init()
            return True
    except RuntimeError:
        pass
    return False


def _agent_serves() -> bool:
    """Whether torch's agent serves the store at MASTER_ADDR, as under torchrun.

    The kernel removes TORCHELASTIC_USE_AGENT_STORE, and `minidist.launch` sets it to False.
    """
    told = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    return told == "True" or (told is None and "TORCHELASTIC_RUN_ID" in os.environ)


def _store(channels: _Channels, case: int) -> Any:
    """A key-value store for this check: a prefix of the store that torchrun already serves."""
    global _base_store
    import torch.distributed as dist

    if _base_store is None:
        if "MASTER_ADDR" in os.environ:
            _base_store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=channels.rank == 0 and not _agent_serves(),
            )
        else:
            _base_store = dist.HashStore()
    return dist.PrefixStore(f"autograder/{case}", _base_store)


@contextmanager
def _harmless_cuda_calls() -> Iterator[None]:
    """Lets code that synchronises or annotates a GPU run on a machine without a GPU.

    Students write such calls for a machine with GPUs; the calls are correct and change no value.
    """
    import torch

    if _cuda_works():
        yield
        return
    with ExitStack() as stack:
        for target, name, harmless in (
            (torch.cuda, "synchronize", lambda *_: None),
            (torch.cuda, "current_stream", _NoGpu),
            (torch.cuda, "stream", lambda _: nullcontext()),
            (torch.cuda, "Stream", _NoGpu),
            (torch.cuda, "Event", _NoGpu),
            (torch.cuda.nvtx, "range", lambda *_, **__: nullcontext()),
            (torch.cuda.nvtx, "range_push", lambda *_: 0),
            (torch.cuda.nvtx, "range_pop", lambda: 0),
            (torch.cuda.nvtx, "mark", lambda *_: None),
        ):
            stack.enter_context(mock.patch.object(target, name, harmless))
        yield


class _NoGpu:
    """A CUDA stream or event for a machine without a GPU: every method returns 0.0."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0.0


# --- connecting ----------------------------------------------------------------------------------


def _connect(path: Path) -> _Channels:
    global _channels
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    sockets = []
    for channel in ("check", "broker"):
        sock = _dial(path)
        sock.settimeout(START_DEADLINE_S)
        send(sock, Message("hello", {"rank": rank, "channel": channel}))
        welcome = receive(sock)
        if welcome.kind != "welcome":
            raise ProtocolError(f"[rank {rank}] refused: {welcome.fields.get('why', '')}")
        sock.settimeout(None)
        sockets.append(sock)
    _channels = _Channels(rank, world_size, *sockets)
    return _channels


def _dial(path: Path) -> socket.socket:
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"no referee at {path} after {START_DEADLINE_S:.0f} s; restart the kernel"
                ) from None
            time.sleep(0.05)
        else:
            return sock


def _practice_referee() -> Path:
    """The path of this notebook's practice referee; rank 0 starts it."""
    run_dir = os.environ.get("MINIDIST_RUN_DIR")
    if run_dir is None:  # a plain script, under torchrun or alone
        job = os.environ.get("MASTER_PORT") or str(os.getpid())
        run_dir = str(Path(tempfile.gettempdir(), f"minidist-{os.getuid()}-{job}"))
        Path(run_dir).mkdir(mode=0o700, exist_ok=True)
    if Path(run_dir).stat().st_uid != os.getuid():
        raise MinidistError(f"{run_dir} belongs to somebody else")
    path = Path(run_dir, f"practice-{os.environ.get('MINIDIST_GENERATION', 0)}.sock")
    if int(os.environ.get("RANK", 0)) == 0:
        ranks = os.environ.get("WORLD_SIZE", "1")
        subprocess.Popen(
            [sys.executable, "-m", "autograder.referee.practice", str(path), "--world-size", ranks],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return path
