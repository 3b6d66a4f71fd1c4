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
import linecache
import os
import pickle
import re
import signal
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from autograder.criteria.common.answers import returned
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs

WIDTH, BLOCKS, SAMPLES = 520, 24, 2
PARAMETER_BYTES = BLOCKS * (WIDTH + 2) * WIDTH * 4
# Allowed beyond the shards, as a fraction of the parameters: for units that are gathered or
# reduced. torch's FSDP and a plain one from scratch take 0.3 to 0.4; all units at once would be 1.
TRANSIENT = 0.75
# The least allowance, in the same unit. On many ranks the shards are small, but the model is whole
# while it is built, and its first shards lie beside it. Units that are never freed take
# 1 + copies / N.
WHOLE = 1.2
# Our own loop runs the class, to judge its memory. The student's function has its own loop and
# runs more steps, so that old gradients and other mistakes of an update show in the later losses.
STEPS = {False: 2, True: 4}  # with AdamW?
LR = 3e-3
FACTOR = 0.98  # by which our own loop changes every shard, whatever its gradient is
# By which `draw_uneven` multiplies the batch of each step: who limits the norm of gradients gets
# another training.
SPREAD = (1.0, 0.3, 0.8, 0.4)
# In float32, losses are off by at most 1e-4. Without AdamW's weight decay they are off by 7e-4
# after one step, because the gains of all blocks multiply.
RTOL = 4e-4
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


def allowance_bytes(world_size: int, copies: int) -> int:
    """Bytes beyond its base that a rank may use to keep its shards of `copies` x the parameters."""
    return int(max(copies / world_size + TRANSIENT, WHOLE) * PARAMETER_BYTES)


# Tensors as large as the parameters that are kept. The class keeps parameters and gradients; the
# function also keeps AdamW's two states.
_CLASS_COPIES, _FUNCTION_COPIES = 2, 4


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
            shape = (STEPS[True], SAMPLES, WIDTH)
            values[f"{name}/{rank}"] = rng.normal(size=shape).astype(np.float32)
    return [values] + [{} for _ in range(source.world_size - 1)]


def draw_uneven(source: Draw) -> list[Values]:
    """Like `draw`, with larger numbers in some steps than in others."""
    first, *rest = draw(source)
    scale = np.array(SPREAD, dtype=np.float32)[:, None, None]
    return [{k: v if k == "seed" else v * scale for k, v in first.items()}, *rest]


def observe_class(fsdp_class: Any, inputs: Values, context: Context) -> Values:
    """Trains the large model with the student's FSDP class, in our own loop."""
    allowance = allowance_bytes(context.world_size, _CLASS_COPIES)
    return launch_limited(_train_with_class, fsdp_class, inputs, context, allowance)


def observe_function(train_large: Any, inputs: Values, context: Context) -> Values:
    """Trains the large model with the student's function."""
    allowance = allowance_bytes(context.world_size, _FUNCTION_COPIES)
    return launch_limited(_train_with_function, train_large, inputs, context, allowance)


def launch_limited(
    train: Any, subject: Any, inputs: Values, context: Context, allowance: int
) -> Values:
    """Runs `train(subject, inputs)` on fresh ranks, with `allowance` bytes beyond their base."""
    if context.rank != 0:
        return {}
    import cloudpickle

    from minidist.errors import LaunchDeadlineError, LaunchError
    from minidist.launch import run

    try:
        results = run(
            run_limited,
            context.world_size,
            cloudpickle.dumps((train, subject, inputs)),
            allowance,
            deadline_s=LAUNCH_DEADLINE_S,
            env=ENVIRONMENT,
        )
    except LaunchDeadlineError as error:
        raise TimeoutError(str(error)) from None
    except LaunchError as error:
        results = [{"status": "died", "text": str(error)}]
    if any("NotImplementedError" in str(r.get("text")) for r in results):
        raise NotImplementedError
    for result in results:
        if where := result.get("where"):
            name, line = where
            result["where"] = _describe(subject, str(name), int(line))
    return {"results": results}


def _describe(subject: Any, name: str, line: int) -> str:
    """The student's line; this process has the text of the notebook's cells, a launched one not."""
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


def run_limited(job: bytes, allowance: int) -> Values:
    """One rank: sets the limit, runs the student's code under it, and returns how that ended."""
    import resource

    # As if each rank had a machine for itself: LOCAL_RANK is not RANK.
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
        return {"status": status, "text": text[:600], "where": _students_line(error)}
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

    The layers are as large as the model's later, because the memory that libraries keep for a
    matrix product depends on its size and on the processor.
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


def _batches(inputs: Values, with_adamw: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    import torch.distributed as dist

    x, y = (torch.from_numpy(inputs[f"{name}/{dist.get_rank()}"]) for name in "xy")
    return list(zip(x, y, strict=True))[: STEPS[with_adamw]]


def _train_with_class(fsdp_class: Any, inputs: Values) -> list[float]:
    """Two steps, after each of which every shard is multiplied by `FACTOR`.

    So gradients exist while the second forward runs. Whether there are any, and whether they are
    right, is not judged here.
    """
    import torch.distributed as dist

    model = build(inputs["seed"])
    fsdp = fsdp_class(model, list(model))
    losses = []
    for x, y in _batches(inputs, with_adamw=False):
        loss = nn.functional.mse_loss(returned(fsdp(x), "fsdp(x)"), y)
        loss.backward()
        with torch.no_grad():
            for p in fsdp.local_parameters():
                p.mul_(FACTOR)
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


def _train_with_function(train_large: Any, inputs: Values) -> Values:
    """The losses; and in words which options of AdamW were not its defaults in some step."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    seed, changed = inputs["seed"], set()
    usual = torch.optim.AdamW([torch.zeros(1)]).defaults

    def note(optimizer: Any, *_: Any) -> None:
        if isinstance(optimizer, torch.optim.AdamW):
            for group in optimizer.param_groups:
                differ = (k for k in _OPTIONS if not np.array_equal(group[k], usual[k]))
                changed.update(f"{k}={group[k]}" for k in differ)

    register_optimizer_step_pre_hook(note)
    losses = train_large(lambda: build(seed), _batches(inputs, with_adamw=True), LR)
    if not isinstance(losses, list | tuple):
        raise TypeError(f"train_large: expected a list of floats, got {type(losses).__name__}")
    return {"losses": [float(loss) for loss in losses], "changed": sorted(changed)}


_OPTIONS = ("betas", "eps", "weight_decay", "amsgrad", "maximize")


# --- judge ---------------------------------------------------------------------------------------


def judge_class(case: Case) -> Iterator[Finding]:
    """The training ends within the limit, with the losses of unsharded training."""
    hint = (
        "Are units freed after forward and after backward (the storage, not only p.data), with "
        "their whole gradients, and is only the next one prefetched?"
    )
    return _judge(case, _CLASS_COPIES, hint)


def judge_function(case: Case) -> Iterator[Finding]:
    """The training ends within the limit, with the losses of unsharded training."""
    hint = (
        "Is every block a unit of its own, are parameters, gradients and AdamW's state sharded, "
        "and is the optimizer made after sharding?"
    )
    return _judge(case, _FUNCTION_COPIES, hint)


def results_of(case: Case) -> list[Values]:
    """What `launch_limited` brought back: of every rank, of one that failed, or nothing."""
    results = case.answers[0].get("results")
    if (
        not isinstance(results, list)
        or len(results) not in (1, case.world_size)
        or not all(isinstance(result, dict) for result in results)
    ):
        return []
    return results


def _judge(case: Case, copies: int, hint: str) -> Iterator[Finding]:
    results = results_of(case)
    if not results:
        yield Finding("the training left no result.")
        return
    budget = (
        f"{allowance_bytes(case.world_size, copies) / MEGABYTE:.0f} MB per rank (whole, the "
        f"training state is {copies * PARAMETER_BYTES / MEGABYTE:.0f} MB)"
    )
    out_of_memory = [r for r in results if is_out_of_memory(r)]
    if out_of_memory:
        yield Finding(
            f"out of memory: the budget is {budget}, and it was used up"
            f"{_place(out_of_memory[0])}.{_or_else(out_of_memory[0])} {hint}"
        )
        return
    if len(results) != case.world_size:
        yield Finding(f"a process of the training failed: {str(results[0].get('text'))[-600:]}")
        return
    expected = np.array(_oracle_losses(case, with_adamw=copies == _FUNCTION_COPIES))
    for rank, result in enumerate(results):
        if result.get("status") != "ok":
            text = str(result.get("text"))[-600:]
            yield Finding(f"a process of the training failed: {text}{_place(result)}", rank)
        elif changed := result.get("changed"):
            why = f"AdamW ran with {str(changed)[:200]}, expected its defaults but for lr."
            yield Finding(why, rank)
        elif wrong := _wrong_losses(case, rank, result.get("losses"), expected, copies):
            yield wrong


def _or_else(result: Values) -> str:
    """What else may have ended a process that a signal has ended; "" if it said why."""
    if _NO_MEMORY.search(_short(result)):
        return ""
    return (
        " Or memory was freed while an all-gather still wrote into it: the process was ended by a "
        "signal, so it could not say."
    )


def _short(result: Values) -> str:
    """A process's last words, without their middle: a search may take quadratic time."""
    text = str(result.get("text"))
    return text if len(text) <= 2 * _TEXT else text[:_TEXT] + text[-_TEXT:]


def _place(result: Values) -> str:
    """The student's line at which a process ended, in brackets; "" if it is not known."""
    where = str(result.get("where") or "")[:200]
    return f" (in {where})" if where else ""


def _wrong_losses(
    case: Case, rank: int, losses: Any, expected: np.ndarray, copies: int
) -> Finding | None:
    """A finding unless these are the losses of all ranks; says what they are, if it is known."""
    got = None
    if isinstance(losses, list) and all(isinstance(v, float) for v in losses):
        got = np.array(losses)
    if got is not None and len(got) != len(expected):
        return Finding(f"{len(got)} losses, expected one for each of {len(expected)} steps.", rank)
    why = "Loss per step, mean over ranks, before the update."
    if copies == _CLASS_COPIES:
        # That a gather brings the values of now is judged elsewhere.
        same = [_first_loss(case, range(case.world_size), step) for step in range(len(expected))]
        if got is not None and np.allclose(got, same, rtol=RTOL, atol=0.0):
            return None
        why = "Two passes, with other shards in the second. The output is not the whole model's."
    elif got is not None:
        own = _first_loss(case, [rank])
        if np.isclose(got[0], expected[0] * case.world_size, rtol=RTOL):
            why = "The first is the sum over ranks, not the mean."
        elif np.isclose(got[0], own, rtol=RTOL):
            why = "The first is this rank's own loss, not the mean over all ranks."
        elif np.isclose(got[0], expected[0], rtol=RTOL):
            why = "The first is right, so the update is not."
            plain = np.array(_oracle_losses(case, with_adamw=True, weight_decay=0.0))
            if np.allclose(got, plain, rtol=RTOL / 2):
                why += " They are those without weight decay, of which AdamW's default is 0.01."
    return differs(rank, "losses", got, expected, rtol=RTOL, atol=0.0, hint=why)


def _first_loss(case: Case, ranks: Iterable[int], step: int = 0) -> float:
    """The loss of these ranks' batches of a step, with the weights as they were at first."""
    inputs = case.inputs[0]
    x, y = (
        torch.from_numpy(np.concatenate([inputs[f"{n}/{r}"][step] for r in ranks])).double()
        for n in "xy"
    )
    with torch.no_grad():
        return nn.functional.mse_loss(build(inputs["seed"], torch.float64)(x), y).item()


def is_out_of_memory(result: dict[str, Any]) -> bool:
    """Whether a process ran out of memory; some of torch's threads can only abort in that case."""
    text = _short(result)
    aborted = any(s.name in text for s in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS))
    return (
        result.get("status") == "memory"
        or bool(_NO_MEMORY.search(text))
        or (result.get("status") == "died" and aborted)
    )


def _oracle_losses(case: Case, with_adamw: bool, weight_decay: float = 0.01) -> list[float]:
    """The losses of one process that trains on all ranks' data in float64."""
    inputs = case.inputs[0]
    model = build(inputs["seed"], torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=weight_decay)
    losses, num_steps = [], STEPS[with_adamw]
    for step in range(num_steps):
        x, y = (
            torch.from_numpy(
                np.concatenate([inputs[f"{n}/{r}"][step] for r in range(case.world_size)])
            ).double()
            for n in "xy"
        )
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(loss.item())
        if step + 1 < num_steps:
            loss.backward()
            if with_adamw:
                optimizer.step()
                optimizer.zero_grad()
            else:
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(FACTOR)
    return losses
