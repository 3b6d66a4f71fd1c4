"""Criteria that enforce a memory limit: the kernel of the machine counts the bytes, not the rank.

Fresh processes, one per rank, join a group, warm everything up, and then lower their own hard
RLIMIT_DATA to their current memory plus an allowance. Only then do they unpickle the student's
code. The memory that the machine or the version of torch needs is in the base and does not count.
Large tensors get mappings of their own, so that the heap does not keep freed memory, and new
threads get small stacks.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import linecache
import os
import pickle
import re
import signal
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.criterion import Case, Context, Draw, Values
from autograder.criteria.not_started import is_not_started

WIDTH, BLOCKS, SAMPLES = 520, 24, 2
BATCHES = 4  # drawn for each rank
PARAMETER_BYTES = BLOCKS * (WIDTH + 2) * WIDTH * 4
LAUNCH_DEADLINE_S = 50.0
MEGABYTE = 2**20
_BALLAST_BYTES = 4 * MEGABYTE  # freed after an error, so that there is memory to report it
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_STACK_BYTES = 1 << 20
# The fresh processes do not use the notebook's store, and no GPU: CUDA does not work under a limit.
ENVIRONMENT = {
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
_NO_MEMORY = re.compile(
    r"not enough memory|can't allocate|cannot allocate|bad_alloc|MemoryError|"
    r"failed to create.*thread|can't start new thread",
    re.IGNORECASE,
)
_LIBRARY = re.compile(r"/(site-packages|autograder|minidist|python3[^/]*)/|<frozen")
_TEXT = 5000  # characters of a message that are searched, at its beginning and at its end


class Block(nn.Module):
    """g * (x + tanh(W x + b))."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=dtype)
        self.gain = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual block."""
        return (x + torch.tanh(self.linear(x))) * self.gain


def build(
    seed: int, dtype: torch.dtype = torch.float32, width: int = WIDTH, num_blocks: int = BLOCKS
) -> nn.Sequential:
    """The large model; the same float32 values in any dtype."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for _ in range(num_blocks):
        block = Block(width, dtype)
        with torch.no_grad():
            for p in block.linear.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * width**-0.5)
            block.gain.add_(torch.randn(width, generator=generator) * 0.05)
        blocks.append(block)
    return nn.Sequential(*blocks)


# --- draw, observe -------------------------------------------------------------------------------


def draw(source: Draw) -> list[Values]:
    """All data goes to rank 0, which launches the ranks; each launched rank gets its own data."""
    seed = int(source.shared().integers(1 << 31))
    values: Values = {"seed": seed}
    for rank in range(source.world_size):
        rng = source.private(rank)
        for name in "xy":
            shape = (BATCHES, SAMPLES, WIDTH)
            values[f"{name}/{rank}"] = rng.normal(size=shape).astype(np.float32)
    return [values] + [{} for _ in range(source.world_size - 1)]


def launch_limited(
    train: Any, subject: Any, inputs: Values, context: Context, allowance: int
) -> Values:
    """Runs `train(subject, inputs)` on fresh ranks, with `allowance` bytes beyond their base."""
    if context.rank != 0:
        return {}
    import cloudpickle

    from minidist.errors import LaunchDeadlineError, LaunchError
    from minidist.launch import run

    with tempfile.TemporaryDirectory() as folder:
        try:
            results = run(
                run_limited,
                context.world_size,
                cloudpickle.dumps((train, subject, inputs)),
                allowance,
                folder,
                deadline_s=LAUNCH_DEADLINE_S,
                env=ENVIRONMENT,
            )
        except LaunchDeadlineError as error:
            # Other ranks may have waited for one that failed: its file has the real reason.
            results = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
            if not results:
                raise TimeoutError(str(error)) from None
        except LaunchError as error:
            results = [{"status": "died", "text": str(error)}]
    if any(is_not_started(str(r.get("text"))) for r in results):
        raise NotImplementedError
    for result in results:
        if where := result.get("where"):
            name, line = where
            result["where"] = _describe(subject, str(name), int(line))
    return {"results": results}


def _describe(subject: Any, name: str, line: int) -> str:
    """The student's line; a launched process does not have the text of the notebook's cells."""
    for function in _functions_beside(subject):
        code = function.__code__
        if code.co_name == name and any(number == line for *_, number in code.co_lines()):
            return f"{name}: {linecache.getline(code.co_filename, line).strip()}"
    return f"{name}, line {line}"


def _functions_beside(subject: Any) -> Iterator[Any]:
    """The functions of the notebook that `subject` comes from, and those of its classes."""
    names = dict(vars(subject)) if isinstance(subject, type) else {"": subject}
    first = next((inspect.unwrap(f) for f in names.values() if inspect.isfunction(f)), None)
    beside = getattr(first, "__globals__", names)
    for value in list(beside.values()):
        for each in vars(value).values() if isinstance(value, type) else [value]:
            if inspect.isfunction(each) and each.__globals__ is beside:
                yield each


def run_limited(job: bytes, allowance: int, folder: str) -> Values:
    """One rank: sets the limit, runs the student's code under it, and returns how the code ended.

    A failure is also written to a file in `folder`, because other ranks may wait for this rank.
    """
    import resource

    # As if each rank had a machine for itself, so that LOCAL_RANK differs from RANK.
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
    _tidy_allocator()
    _warm_up()
    ballast = [bytearray(_BALLAST_BYTES)]
    limit = _data_bytes() + allowance
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        train, subject, inputs = pickle.loads(job)
        _tell_rank(subject)
        result = train(subject, inputs)
    except BaseException as error:
        ballast.clear()
        text = f"{type(error).__name__}: {error}"
        status = "memory" if _NO_MEMORY.search(text) else "error"
        failed = {"status": status, "text": text[:600], "where": _students_line(error)}
        Path(folder, os.environ["RANK"]).write_text(json.dumps(failed))
        return failed
    return {"status": "ok"} | (result if isinstance(result, dict) else {"losses": result})


def _tell_rank(subject: Any) -> None:
    """Makes the notebook's own `rank`, `world_size` and `device` those of this process.

    The notebook's code came here from rank 0, with the numbers of rank 0.
    """
    import torch.distributed as dist

    here: Values = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    here["device"] = torch.device("cpu")
    function = next(_functions_beside(subject), None)
    names = getattr(function, "__globals__", {})
    names.update({name: value for name, value in here.items() if name in names})


def _students_line(error: BaseException) -> tuple[str, int] | None:
    """(function, line) of the innermost frame that is no library's and not ours."""
    found = None
    for frame in traceback.extract_tb(error.__traceback__):
        if not _LIBRARY.search(frame.filename):
            found = (frame.name, frame.lineno or 0)
    return found


def _tidy_allocator() -> None:
    """Makes glibc return freed memory at once and give threads small stacks."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
        attributes = ctypes.create_string_buffer(256)
        if libc.pthread_attr_init(attributes) == 0:
            libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK_BYTES))
            libc.pthread_setattr_default_np(attributes)


def _warm_up() -> None:
    """Joins the group, and trains two layers of the model with everything a submission may use.

    The layers are as large as those of the student's model, because the memory that libraries keep
    for a matrix product depends on its size and on the processor.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    batch = torch.ones(SAMPLES, WIDTH)
    for sharded in (False, True):
        tiny = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        model: Any = fully_shard(tiny, mesh=mesh) if sharded else DistributedDataParallel(tiny)
        optimizer = torch.optim.AdamW(model.parameters())
        nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()


def _data_bytes() -> int:
    """Bytes of private writable memory of this process, which RLIMIT_DATA limits."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmData")


# --- judge ---------------------------------------------------------------------------------------


def results_of(case: Case) -> list[Values]:
    """The results of all ranks, or of the failed ranks only; [] if the answer is malformed.

    At the deadline, several ranks may have failed and told why, while others still wait for them.
    """
    results = case.answers[0].get("results")
    if (
        not isinstance(results, list)
        or not 1 <= len(results) <= case.world_size
        or not all(isinstance(result, dict) for result in results)
    ):
        return []
    return results


def _short(result: Values) -> str:
    """A process's last words, without their middle: a search may take quadratic time."""
    text = str(result.get("text"))
    return text if len(text) <= 2 * _TEXT else text[:_TEXT] + text[-_TEXT:]


def says_no_memory(result: Values) -> bool:
    """Whether a process's last words are about memory."""
    return bool(_NO_MEMORY.search(_short(result)))


def is_out_of_memory(result: dict[str, Any]) -> bool:
    """Whether a process ran out of memory; some of torch's threads can only abort in that case."""
    status, text = result.get("status"), _short(result)
    aborted = any(s.name in text for s in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS))
    return status == "memory" or says_no_memory(result) or (status == "died" and aborted)
