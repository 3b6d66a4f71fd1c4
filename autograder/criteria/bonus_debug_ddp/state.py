"""Criteria for state: what all ranks share, what each rank has of its own, and what is saved."""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from autograder.criteria.bonus_debug_ddp import causes
from autograder.criteria.common import oracle
from autograder.criteria.common.answers import same_array, told
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs, integer

SHAPE = (3, 4)

# --- the same start ------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Trainable and frozen parameters; float and integer buffers, one of them not persistent.

    The tensors named in `deep` are in a layer of a block, as in most networks.
    """

    def __init__(self, inputs: Values) -> None:
        super().__init__()
        layer = nn.Module()
        self.block = nn.Sequential(layer)
        for name in inputs["names"]:
            value = torch.from_numpy(np.array(inputs[name]))
            owner = layer if name in inputs["deep"] else self
            if name.startswith("buffer"):
                owner.register_buffer(name, value, persistent=name != "buffer_mask")
            else:
                trains = not name.startswith("frozen")
                owner.register_parameter(name, nn.Parameter(value, requires_grad=trains))


def _draw_state(draw: Draw, extra: tuple[str, ...], deep: tuple[str, ...] = ()) -> list[Values]:
    names = ["weight", *extra, "bias"]
    inputs = []
    for rank in range(draw.world_size):
        rng = draw.private(rank)
        values: Values = {"names": names, "deep": list(deep)}
        for name in names:
            is_count = name.endswith("count")
            values[name] = (
                rng.integers(1 << 40, 1 << 50, size=())  # float32 cannot hold it
                if is_count
                else rng.normal(size=SHAPE).astype(np.float32)
            )
        inputs.append(values)
    return inputs


def draw_buffers(draw: Draw) -> list[Values]:
    """Buffers, and parameters that are all trainable; one of each is deep.

    In `draw_frozen` nothing is deep: code that sees only the outer layers loses one criterion.
    """
    extra = ("buffer_mean", "buffer_count", "buffer_mask")
    return _draw_state(draw, extra, deep=("buffer_mean", "bias"))


def draw_frozen(draw: Draw) -> list[Values]:
    """Parameters, two of which are frozen, and no buffers."""
    return _draw_state(draw, ("frozen_embedding", "frozen_scale"))


def observe_broadcast(broadcast_model: Any, inputs: Values, context: Context) -> Values:
    """Parameters and buffers after the call."""
    model = Stateful(inputs).to(context.device)
    if context.device.type == "cpu":  # NCCL refuses to broadcast what is not contiguous
        for buffer in model.buffers():
            buffer.data = buffer.data.mT.contiguous().mT if buffer.ndim else buffer.data
    broadcast_model(model)
    values = dict(model.named_parameters()) | dict(model.named_buffers())
    return {
        name.split(".")[-1]: value.detach().cpu().numpy().copy() for name, value in values.items()
    }


def judge_broadcast(case: Case) -> Iterator[Finding]:
    """On every rank, all parameters and buffers have rank 0's values.

    The mean of all ranks in place of rank 0's costs only `debug_broadcast_buffers`.
    """
    has_buffers = "buffer_mean" in case.inputs[0]["names"]
    for rank, answer in enumerate(case.answers):
        for name in case.inputs[0]["names"]:
            everyones = [inputs[name] for inputs in case.inputs]
            if not has_buffers and oracle.agrees(answer.get(name), oracle.mean(everyones)):
                continue
            if wrong := differs(
                rank,
                f"{'buffer' * name.startswith('buffer') or 'parameter'} {name}",
                answer.get(name),
                case.inputs[0][name],
                rtol=0.0,
                atol=0.0,
                hint=causes.explain_broadcast(case, answer, name),
            ):
                yield wrong
                break


# --- a checkpoint --------------------------------------------------------------------------------

SIZES, SAMPLES = (4, 6, 2), 5
LATE_S = 0.3


def draw_resume(draw: Draw) -> list[Values]:
    """One training run, the same on all ranks, with steps before and after a checkpoint."""
    rng = draw.shared()
    before, after = (int(n) for n in rng.integers(3, 6, size=2))
    values = oracle.draw_parameters(rng, SIZES) | {"before": before, "after": after}
    values["use"] = str(rng.choice(["adam", "momentum"]))
    # The run went back to an earlier step: neither the largest number nor the last name counts.
    last = int(rng.choice([10, 100]))
    values["saved"] = [last + 10, last + int(rng.integers(1, 10)), last - 1, last]
    batch = oracle.draw_batch(rng, (before + after) * SAMPLES, SIZES)
    values |= {n: batch[n].reshape(before + after, SAMPLES, -1) for n in "xy"}
    return [dict(values) for _ in range(draw.world_size)]


def draw_random(draw: Draw) -> list[Values]:
    """A different seed on each rank, and how many numbers the rank draws before the checkpoint."""
    start = oracle.draw_parameters(draw.shared(), SIZES)
    return [
        start | {"seed": int(draw.private(r).integers(1 << 30)), "before": 3 + 2 * r}
        for r in range(draw.world_size)
    ]


def _shared_folder(context: Context) -> Path:
    """A folder that rank 0 makes and all ranks see.

    The folder disappears when the box, the kernel or the script that contains it ends.
    """
    folder = [""]
    if context.rank == 0:
        in_box = "MINIDIST_REFEREE" in os.environ
        where = None if in_box else os.environ.get("MINIDIST_RUN_DIR")
        folder = [tempfile.mkdtemp(prefix="minidist-resume-", dir=where)]
        atexit.register(shutil.rmtree, folder[0], ignore_errors=True)
    dist.broadcast_object_list(folder, src=0, device=context.device)
    return Path(folder[0])


def _model(inputs: Values) -> nn.Module:
    """In float64; BatchNorm has buffers, which no optimizer knows of."""
    return nn.Sequential(nn.BatchNorm1d(SIZES[0]).double(), oracle.mlp(inputs, torch.float64))


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.05)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Values, steps: range, device: Any
) -> None:
    for step in steps:
        x, y = (torch.from_numpy(inputs[n][step]).double().to(device) for n in "xy")
        optimizer.zero_grad()
        oracle.mse(model(x), y).backward()
        optimizer.step()


@contextlib.contextmanager
def _late_files(rank: int) -> Iterator[None]:
    """Delays the ranks' files, rank 0's the most, so that a missing wait shows."""
    save = torch.save

    def late(*args: Any, **options: Any) -> None:
        time.sleep(LATE_S / (1 + rank))
        save(*args, **options)

    with mock.patch.object(torch, "save", late):
        yield


def _files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """When each file was written, and how long it is."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another rank has just renamed it
            if path.is_file():
                stat = path.stat()
                found[str(path.relative_to(folder))] = stat.st_mtime_ns, stat.st_size
    return found


def _lower_lr(optimizer: torch.optim.Optimizer) -> None:
    """Lowers the learning rate as a scheduler does; it is part of the optimizer's state."""
    for group in optimizer.param_groups:
        group["lr"] /= 2


def observe_resume(subject: Any, inputs: Values, context: Context) -> Values:
    """Trains, saves, loads into a new model and a new optimizer, and continues training.

    Earlier checkpoints are in the folder, and the learning rate changes before the last one.
    """
    save_checkpoint, load_checkpoint = subject
    folder = _shared_folder(context)
    before, end = inputs["before"], inputs["before"] + inputs["after"]
    model = _model(inputs).to(context.device)
    optimizer = _optimizer(inputs["use"], model)
    for step in inputs["saved"][:-1]:
        save_checkpoint(folder, model, optimizer, step)
        dist.barrier()
    _train(model, optimizer, inputs, range(before), context.device)
    _lower_lr(optimizer)
    with _late_files(context.rank):
        save_checkpoint(folder, model, optimizer, inputs["saved"][-1])
    files = _files_in(folder)

    model = _model(inputs).to(context.device)
    optimizer = _optimizer(inputs["use"], model)
    step = integer(load_checkpoint(folder, model, optimizer), "load_checkpoint")
    _train(model, optimizer, inputs, range(before, end), context.device)
    dist.barrier()
    late = [name for name, file in _files_in(folder).items() if files.get(name) != file]
    answer: Values = {"step": step, "late": sorted(late)}
    for name, value in model.state_dict().items():
        answer[name] = value.cpu().double().numpy().copy()
    return answer


def judge_resume(case: Case) -> Iterator[Finding]:
    """The model is that of a run that was never interrupted, and no file comes late."""
    inputs = case.inputs[0]
    model = _model(inputs)
    before, optimizer = inputs["before"], _optimizer(inputs["use"], model)
    _train(model, optimizer, inputs, range(before), "cpu")
    _lower_lr(optimizer)
    saved = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    rest = range(before, before + inputs["after"])
    _train(model, optimizer, inputs, rest, "cpu")
    for rank, answer in enumerate(case.answers):
        if (late := told(answer, "late")) != []:
            yield Finding(
                f"files that were not yet there, or not as they are now, when save_checkpoint "
                f"returned: {late}. No rank may leave before all have written.",
                rank,
            )
            continue
        if (step := told(answer, "step")) != inputs["saved"][-1]:
            why = "No such step was saved: return the one that was."
            if step == inputs["saved"][0]:
                why = "That is the first of them, and the largest number: the last one counts."
            elif step == inputs["saved"][-2]:
                why = "It is the last one that counts, not the last by name."
            elif step in inputs["saved"]:
                why = "That was saved earlier: the last one counts, whatever its number."
            yield Finding(
                f"load_checkpoint returned {answer.get('step')}; saved were, in this order, the "
                f"steps {inputs['saved']}. {why}",
                rank,
            )
            continue
        for name, value in model.state_dict().items():
            what = f"{name}, {inputs['after']} steps after the restart ({inputs['use']})"
            right = value.double().numpy()
            if wrong := oracle.differs(rank, what, answer.get(name), right, dtype="float64"):
                again = partial(_train, inputs=inputs, steps=rest, device="cpu")
                new = partial(_optimizer, inputs["use"])
                yield causes.because(wrong, causes.explain_resume(answer, name, *saved, new, again))
                break


NUM_DRAWN = 6
EARLIER, LAST = 1, 2  # the steps of the saves in `observe_random`


def observe_random(subject: Any, inputs: Values, context: Context) -> Values:
    """The random numbers that this rank draws after the last save, and after a restart."""
    save_checkpoint, load_checkpoint = subject
    folder = _shared_folder(context)
    model = oracle.mlp(inputs).to(context.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.random.fork_rng(devices=[]):
        for step, before in (EARLIER, 1), (LAST, inputs["before"]):
            torch.manual_seed(inputs["seed"])
            torch.rand(before)
            save_checkpoint(folder, model, optimizer, step)
            dist.barrier()  # a save that does not wait costs only `debug_resume_optimizer`
        went_on = torch.rand(NUM_DRAWN).numpy()
        torch.manual_seed(0)  # a new process does not have the old generator state
        step = load_checkpoint(folder, model, optimizer)
        drawn = torch.rand(NUM_DRAWN).numpy()
        is_earlier = isinstance(step, int) and step == EARLIER
        return {"drawn": drawn, "went on": went_on, "earlier": is_earlier}


def _numbers(seed: int, before: int = 0) -> np.ndarray:
    """The next numbers of a generator that has drawn `before` numbers since it was seeded."""
    generator = torch.Generator().manual_seed(seed)
    torch.rand(before, generator=generator)
    return torch.rand(NUM_DRAWN, generator=generator).numpy()


def judge_random(case: Case) -> Iterator[Finding]:
    """Each rank continues its own sequence of random numbers.

    Code that loads an earlier checkpoint as a whole loses only `debug_resume_optimizer`.
    """
    expected = [_numbers(inputs["seed"], inputs["before"]) for inputs in case.inputs]
    for rank, answer in enumerate(case.answers):
        got, seed = answer.get("drawn"), case.inputs[rank]["seed"]
        earlier = _numbers(seed, 1)
        is_whole = told(answer, "earlier") is True and same_array(got, earlier)
        hint = "Dropout after the restart uses other masks than the uninterrupted run."
        for other, others in enumerate(expected):
            if other != rank and same_array(got, others):
                hint = f"That is how rank {other} goes on: every rank has a state of its own."
        if same_array(got, _numbers(0)):
            hint = "That is how a new process begins: the generator's state has to come back."
        if same_array(got, earlier):
            hint = "That is how this rank went on after an earlier save: the last one counts."
        if same_array(got, _numbers(seed)):
            hint = "That is how it began after its seed: its state has to come back, not the seed."
        goes_on = "A run that saves goes on as one that does not: save_checkpoint draws no numbers."
        went_on = answer.get("went on")
        for what, numbers, right, why in (
            ("the restart", got, earlier if is_whole else expected[rank], hint),
            ("save_checkpoint, without a restart", went_on, expected[rank], goes_on),
        ):
            what = f"random numbers after {what}"
            if wrong := differs(rank, what, numbers, right, rtol=1e-6, atol=1e-6, hint=why):
                yield wrong
                break
