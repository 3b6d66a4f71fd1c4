"""Criteria for tasks 1 and 2 of lab 1: the process group, and torch's DDP around a model.

Grading has no GPU, or fewer than ranks, and one node. So the student's functions run a second time
where torch says that there are GPUs and the environment says that there are two nodes; functions
that would use them only note how they were called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as torch_ddp

from autograder.criteria.common import oracle
from autograder.criteria.common.answers import told
from autograder.criteria.common.pretending import pretending
from autograder.criteria.common.virtual_cluster import MEET, NODES, PER_NODE, Place
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values, differs, integer

GPUS = (0, PER_NODE - 1, PER_NODE, PER_NODE + 1)  # per node


def _touches_hardware(error: Exception) -> bool:
    """Whether code failed because it used a GPU, or a process group, that is not there."""
    return any(word in str(error) for word in ("CUDA", "NVIDIA", "process group", "cuda"))


# --- setup ---------------------------------------------------------------------------------------


def draw_setup(draw: Draw) -> list[Values]:
    """A private vector per rank."""
    return [{"value": draw.private(r).normal(size=5)} for r in range(draw.world_size)]


def observe_setup(functions: Any, inputs: Values, context: Context) -> Values:
    """Sets up twice, then sums the private vectors over the resulting process group.

    Args:
        functions: setup_distributed and cleanup.
    """
    setup_distributed, cleanup = functions
    places = _observe_places(setup_distributed, context)
    invented = _observe_no_address(setup_distributed)
    left = _observe_cleanup(cleanup)
    if any(p["rank"] != p["given rank"] for p in places if "rank" in p):
        return {"places": places}  # a real group of such ranks would never come together
    setup_distributed()
    group = dist.group.WORLD
    rank, world_size, device = setup_distributed()
    device = torch.device(device)
    value = torch.from_numpy(inputs["value"]).to(device)
    dist.all_reduce(value)
    return {
        "rank": integer(rank, "rank"),
        "world_size": integer(world_size, "world_size"),
        "device": device.type,
        "backend": str(dist.get_backend()),
        "sum": value.cpu().numpy(),
        "same_group": dist.group.WORLD is group,
        "places": places,
        "invented": invented,
        "left": left,
    }


def _observe_places(setup_distributed: Any, context: Context) -> list[Values]:
    """What the function does at this rank's share of the places of the virtual cluster.

    Rank 0 tries two more, where it is the only rank of its world.
    """
    ranks = range(context.rank, NODES * PER_NODE, context.world_size)
    places = [Place(rank, gpus) for rank in ranks for gpus in GPUS]
    if context.rank == 0:
        places += [Place(0, gpus, world_size=1, per_node=1) for gpus in (0, 1)]
    for place in places:
        with (
            mock.patch.dict(os.environ, place.environment),
            pretending(setup_distributed, place.instead()),
        ):
            try:
                setup_distributed()
                said = setup_distributed()
            except Exception as error:
                if not _touches_hardware(error):
                    raise
                continue
        if not isinstance(said, tuple) or len(said) != 3:
            raise TypeError(
                f"setup_distributed() must return (rank, world_size, device), got {said!r:.100}"
            )
        place.told |= {
            "rank": integer(said[0], "rank"),
            "world_size": integer(said[1], "world_size"),
            "device": str(torch.device(said[2])),
            "backend": place.backend,
            "joined": place.joined,
            "current": place.current,
            "meets": place.meets,
        }
    return [place.told for place in places]


def _observe_no_address(setup_distributed: Any) -> str:
    """Where ranks meet if the environment does not say where; "" if they do not, as in torch."""
    place = Place(rank=0, gpus=0)
    with (
        mock.patch.dict(os.environ, place.environment),
        pretending(setup_distributed, place.instead()),
        suppress(Exception),
    ):
        for name in MEET:
            del os.environ[name]
        setup_distributed()
    return "" if "None" in place.meets else place.meets


def _observe_cleanup(cleanup: Any) -> bool:
    """Whether `cleanup` leaves a process group. Without a group it must not raise."""
    place = Place(rank=0, gpus=0)
    with mock.patch.dict(os.environ, place.environment), pretending(cleanup, place.instead()):
        place.joined = 1
        cleanup()
        left = not place.joined
        place.joined = 0
        cleanup()
    return left


def _judge_place(place: Values) -> str | None:
    """What is wrong at one place of the virtual cluster, or None."""
    rank, gpus, per_node = place["given rank"], place["gpus"], place["per node"]
    local = rank % per_node
    for what, expected in (("rank", rank), ("world_size", place["world"])):
        if place.get(what) != expected:
            return f"{what}: expected {expected}, got {place.get(what)}"
    if place.get("joined") != 1:
        return f"two calls joined {place.get('joined')} process groups"
    expected = ("nccl", f"cuda:{local}") if gpus >= per_node else ("gloo", "cpu")
    backend, device = str(place.get("backend")), place.get("device")
    if expected[0] not in backend or device != expected[1]:
        return f"expected backend {expected[0]} on {expected[1]}, got {backend} on {device}"
    if gpus >= per_node and place.get("current") != local:
        return f"cuda:{local} was not made the current CUDA device"
    meet = f"tcp://{MEET['MASTER_ADDR']}:{MEET['MASTER_PORT']}"
    if (meets := place.get("meets")) and meets != meet:
        return f"the ranks meet at {meets}, but the environment names {meet}"
    return None


def judge_setup(case: Case) -> Iterator[Finding]:
    """Right rank and world size, a device that fits the backend, and a group that communicates.

    Rank and world size may come from the group or from the environment.
    """
    total = np.sum([inputs["value"] for inputs in case.inputs], axis=0)
    for rank, answer in enumerate(case.answers):
        places = answer.get("places")
        for place in places if isinstance(places, list) else []:
            if "rank" in place and (problem := _judge_place(place)):
                world, per_node = place["world"], place["per node"]
                local = place["given rank"] % per_node
                where = f"on {world // per_node} nodes of {per_node} ranks and"
                where = f"{where} {place['gpus']} GPUs each," if world > 1 else "in a world of one,"
                yield Finding(
                    f"{where} rank {place['given rank']} (LOCAL_RANK {local}): {problem}.", rank
                )
                break
        if "sum" not in answer and isinstance(places, list):
            continue  # a place showed a wrong rank, so there was no real group
        for what, expected in (("rank", rank), ("world_size", case.world_size)):
            if answer.get(what) != expected:
                yield Finding(f"{what}: expected {expected}, got {answer.get(what)}.", rank)
        pair = (answer.get("device"), answer.get("backend"))
        if pair not in (("cpu", "gloo"), ("cuda", "nccl"), ("cuda", "gloo")):
            yield Finding(
                f"device {pair[0]!r} with backend {pair[1]!r}: use nccl where each rank has a "
                "GPU of its own, else gloo on the CPU.",
                rank,
            )
        if answer.get("same_group") is not True:
            yield Finding("the second call replaced the process group.", rank)
        if invented := answer.get("invented"):
            yield Finding(
                "without MASTER_ADDR and MASTER_PORT in the environment the ranks meet at "
                f"{invented}. Only torchrun knows the place: hard-code none.",
                rank,
            )
        if answer.get("left") is not True:
            yield Finding("after cleanup() there is still a process group.", rank)
        if wrong := differs(
            rank, "sum over ranks", answer.get("sum"), total, rtol=1e-9, atol=1e-12
        ):
            yield wrong


# --- wrap_model ----------------------------------------------------------------------------------

WRAP_SIZES = (5, 7, 2)


def draw_wrap(draw: Draw) -> list[Values]:
    """Every rank starts with different parameters and has different data; the model is float64."""
    return [
        oracle.draw_parameters(draw.private(r), WRAP_SIZES)
        | oracle.draw_batch(draw.private(r), 6, WRAP_SIZES)
        for r in range(draw.world_size)
    ]


def observe_wrap(wrap_model: Any, inputs: Values, context: Context) -> Values:
    """Parameters after wrapping, gradients after one backward."""
    on_gpu = _wrap_on_a_gpu(wrap_model)
    model = oracle.mlp(inputs, torch.float64)
    model.register_buffer("seen", torch.full((1,), float(context.rank)))
    wrapped = wrap_model(model, context.device)
    if not isinstance(wrapped, DistributedDataParallel):
        raise TypeError(
            "wrap_model: expected a torch.nn.parallel.DistributedDataParallel, "
            f"got {type(wrapped).__name__}"
        )
    dtype = next(wrapped.parameters()).dtype
    x, y = (torch.from_numpy(inputs[k]).to(context.device, dtype) for k in "xy")
    oracle.mse(wrapped(x), y).backward()
    answer: Values = {"on a GPU": on_gpu}
    answer["buffer"] = float(model.seen)  # type: ignore[arg-type]
    answer["same"] = {id(p) for p in wrapped.parameters()} == {id(p) for p in model.parameters()}
    for i, p in enumerate(wrapped.parameters()):
        answer[f"p{i}"] = p.detach().cpu().numpy()
        answer[f"g{i}"] = oracle.grad_of(p)
    return answer


class _NotesMoves(nn.Linear):
    """A model that stays on the CPU, and notes whether it was told to move."""

    moved = False

    def to(self, *_: Any, **__: Any) -> Any:
        self.moved = True
        return self

    cuda = to


class _NotesWrapping(nn.Module):
    """Stands for torch's DDP on a GPU."""

    def __init__(self, module: Any, device_ids: Any = None, *_: Any, **__: Any) -> None:
        super().__init__()
        self.module = module
        self.seen: Values = {"moved": module.moved, "device_ids": None}
        if device_ids is not None:
            self.seen["device_ids"] = [
                i if isinstance(i, int) else torch.device(i).index for i in device_ids
            ]

    def to(self, *_: Any, **__: Any) -> Any:
        """Does nothing: the model has to move before it is wrapped."""
        return self

    cuda = to


def _wrap_on_a_gpu(wrap_model: Any) -> Values:
    """How the function wraps a model for cuda:1; empty if that cannot be seen here."""
    instead = {
        (torch.nn.parallel, "DistributedDataParallel"): _NotesWrapping,
        (torch_ddp, "DistributedDataParallel"): _NotesWrapping,
    }
    with pretending(wrap_model, instead):
        try:
            wrapped = wrap_model(_NotesMoves(2, 1), torch.device("cuda", 1))
        except Exception as error:
            if not _touches_hardware(error):
                raise
            return {}
    return wrapped.seen if isinstance(wrapped, _NotesWrapping) else {}


def judge_wrap(case: Case) -> Iterator[Finding]:
    """Parameters are rank 0's, gradients the mean over ranks.

    On the CPU device_ids may be left out or None.
    """
    start = oracle.parameters_of(case.inputs[0])
    local = [oracle.gradients(case.inputs[0], i["x"], i["y"]) for i in case.inputs]
    for rank, answer in enumerate(case.answers):
        seen = answer.get("on a GPU")
        if isinstance(seen, dict) and seen.get("moved") is False:
            yield Finding("on cuda:1 the model was wrapped before it was moved there.", rank)
        elif isinstance(seen, dict) and seen and seen.get("device_ids") != [1]:
            yield Finding(
                f"on cuda:1, expected device_ids=[1], got {seen.get('device_ids')}.", rank
            )
        if answer.get("same") is False:
            yield Finding(
                "what was wrapped is a copy: the model that was passed is not trained.", rank
            )
        elif told(answer, "buffer") != 0.0:
            yield Finding(
                "a buffer is not rank 0's: a BatchNorm would go on from different statistics on "
                "each rank. Leave broadcast_buffers as it is.",
                rank,
            )
        for i, expected in enumerate(start):
            dtype = getattr(answer.get(f"p{i}"), "dtype", np.float64)
            if dtype != np.float64:
                yield Finding(
                    f"parameter {i} was float64 and is {dtype} after wrapping: move the model, but "
                    "leave its dtype alone.",
                    rank,
                )
                break
            if wrong := oracle.differs(
                rank,
                f"parameter {i} after wrapping",
                answer.get(f"p{i}"),
                expected,
                hint="DDP copies rank 0's parameters to every rank.",
            ):
                yield wrong
                break
            grad = oracle.mean([grads[i] for grads in local])
            got = answer.get(f"g{i}")
            hint = oracle.explain_gradient(got, grad, local[rank][i], case.world_size)
            if wrong := oracle.differs(rank, f"gradient {i}", got, grad, hint=hint):
                yield wrong
