"""Criteria for the policies of `fully_shard`, and for checkpoints of sharded models.

The saving criterion runs on the emulated cluster: if a rank gathers while the other ranks have gone
on, an error says so at once and names the ranks that it waits for.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from autograder.criteria.common import answers, oracle
from autograder.criteria.common.answers import is_floats, item_of
from autograder.criteria.common.places import LAST_ALONE
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.lab3_fsdp import parts

SIZES = (10, 13, 11, 6)  # 2, 3 and 4 do not divide 13 and 11 rows
BATCH, LR = 4, 0.02
# Far above the rounding error of a gradient: with a smaller eps, AdamW turns the rounding error of
# a gradient that should be 0 into a large step.
EPS = 1e-3
BEFORE, AFTER = 3, 2
DECAYS = 0.3  # weight decay
# After each step, every group's options are multiplied by these: a fresh optimizer's then differ.
SCHEDULE = {"lr": 0.8, "weight_decay": 0.9}
FIRST_BETA = 0.9  # likewise, for the first beta


# --- policies ------------------------------------------------------------------------------------


def draw_policies(draw: Draw) -> list[Values]:
    """All combinations, in a random order; "xpu" stands for devices that are neither."""
    cases = [
        [d, m, o] for d in ("cpu", "cuda", "xpu") for m in (False, True) for o in (False, True)
    ]
    order = draw.shared().permutation(len(cases))
    return [{"cases": [cases[i] for i in order]} for _ in range(draw.world_size)]


def observe_policies(policies: Any, inputs: Values, context: Context) -> Values:
    """The content of the returned dict for each combination."""
    told = []
    for device_type, mixed, offload in inputs["cases"]:
        options = policies(device_type, mixed, offload)
        if not isinstance(options, dict):
            raise TypeError(f"policies: expected a dict, got {type(options).__name__}")
        told.append(_describe(options))
    return {"told": told}


def _describe(options: dict[str, Any]) -> Values:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    precision = options.get("mp_policy", MixedPrecisionPolicy())
    where = options.get("offload_policy", OffloadPolicy())
    if not isinstance(precision, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy: expected a MixedPrecisionPolicy, got {precision!r}")
    if not isinstance(where, OffloadPolicy):
        raise TypeError(f"offload_policy: expected an OffloadPolicy, got {where!r}")
    return {
        "keys": sorted(map(str, set(options) - {"mp_policy", "offload_policy"})),
        "param_dtype": _name(precision.param_dtype),
        "reduce_dtype": _name(precision.reduce_dtype),
        "casts": bool(precision.cast_forward_inputs),
        "offload": isinstance(where, CPUOffloadPolicy),
        "pinned": bool(where.pin_memory) if isinstance(where, CPUOffloadPolicy) else False,
    }


def _name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def judge_policies(case: Case) -> Iterator[Finding]:
    """bf16 and fp32 if mixed; CPU memory if offloaded, pinned if the device is a GPU.

    An option that has fully_shard's default may be left out.
    """
    for rank, answer in enumerate(case.answers):
        for number, (device_type, mixed, offload) in enumerate(case.inputs[rank]["cases"]):
            told = answer.get("told")
            got = item_of(told, number)
            problem = _policy_problem(got, device_type, mixed, offload)
            if problem:
                call = f"policies({device_type!r}, mixed={mixed}, offload={offload})"
                yield Finding(f"{call}: {problem}", rank)
                break


def _policy_problem(got: Any, device_type: str, mixed: bool, offload: bool) -> str:
    if not isinstance(got, dict) or got.get("keys") != []:
        return "expected a dict with mp_policy and offload_policy."
    pair = (got.get("param_dtype"), got.get("reduce_dtype"))
    # Without mixed precision: no cast, or a cast to the dtype that it has anyway.
    right = (
        [("bfloat16", "float32")]
        if mixed
        else [(p, r) for p in (None, "float32") for r in (None, "float32")]
    )
    if pair not in right:
        return f"expected param_dtype, reduce_dtype {right[0]}, got {pair}."
    if mixed and got.get("casts") is not True:
        return "cast_forward_inputs is False: a layer with bf16 weights fails with fp32 inputs."
    if got.get("offload") is not offload:
        return f"expected offloading to be {'on' if offload else 'off'}."
    if offload and got.get("pinned") is not (device_type == "cuda"):
        return (
            f"pin_memory is {got.get('pinned')}, expected {device_type == 'cuda'}: True for the "
            'device type "cuda", and for no other.'
        )
    return ""


# --- checkpoints ---------------------------------------------------------------------------------


def draw_checkpoint(draw: Draw) -> list[Values]:
    """The same model on all ranks, a different model to load into, different data per rank."""
    rng = draw.shared()
    start = parts.draw_mlp(rng, SIZES)
    other = {f"other/{k}": v for k, v in parts.draw_mlp(rng, SIZES).items()}
    inputs = []
    for rank in range(draw.world_size):
        batch = oracle.draw_batch(draw.private(rank), BATCH, SIZES)
        inputs.append(start | other | batch)
    return inputs


def _sharded(values: Values, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    mesh = parts.make_mesh(device.type)
    model = oracle.mlp(values).to(device)
    model.register_buffer("seen", torch.full((3,), values["p0"][0, 0].item(), device=device))
    # A buffer that state_dict() leaves out, as masks and tables often are.
    model.register_buffer("table", torch.full((2,), 7.0, device=device), persistent=False)
    model[0].bias.requires_grad_(False)  # as if pretrained: the checkpoint has to hold it as well
    model[0].eval()  # as a pretrained BatchNorm would be, while the rest trains
    for module in [*parts.linears(model), model]:
        fully_shard(module, mesh=mesh)
    return model, _optimizer(model)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two groups, as usual: biases have a learning rate of their own and no decay."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    weights, biases = ([p for n, p in named if n.endswith(kind)] for kind in ("weight", "bias"))
    groups = [
        {"params": weights, "weight_decay": DECAYS},
        {"params": biases, "weight_decay": 0.0, "lr": 2 * LR},
    ]
    return torch.optim.AdamW(groups, lr=LR, eps=EPS)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, values: Values, num_steps: int
) -> None:
    device = next(model.parameters()).device
    x, y = (torch.from_numpy(values[name]).to(device) for name in "xy")
    for _ in range(num_steps):
        oracle.mse(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        _schedule(optimizer)
        model.seen += 1.0  # type: ignore[operator]  # as BatchNorm's buffers change


def _schedule(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group |= {name: group[name] * factor for name, factor in SCHEDULE.items()}
        first, second = group["betas"]
        group["betas"] = (first * FIRST_BETA, second)


def observe_save(save_checkpoint: Any, inputs: Values, context: Context) -> Values:
    """Trains and saves; every rank returns what is then in its own folder."""
    model, optimizer = _sharded(inputs, context.device)
    _train(model, optimizer, inputs, BEFORE)
    model(torch.ones(BATCH, SIZES[0], device=context.device)).square().mean().backward()
    before = _beside(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        save_checkpoint(model, optimizer, str(path))
        dist.barrier()
        after = _beside(model, optimizer)
        answer: Values = {"files": sorted(p.name for p in Path(folder).iterdir())}
        answer["changed"] = [what for what in before if before[what] != after[what]]
        if context.rank == 0 and path.is_file():
            answer |= _content(path)
    return answer


def _beside(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """What saving must not change, beside the values; the keys are text for a message."""
    grads = [None if p.grad is None else parts.array_of(p.grad) for p in model.parameters()]
    return {
        "the gradients": [None if g is None else g.tolist() for g in grads],
        "whether the model trains (model.training)": [m.training for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "the learning rates": [group["lr"] for group in optimizer.param_groups],
    }


def _listed(names: Any) -> str:
    return " and ".join(map(str, names)) if isinstance(names, list) else str(names)


def _content(path: Path) -> Values:
    """What the file holds: names, kinds and values under "model", numbers under "optimizer"."""
    state = torch.load(path, map_location="cpu")
    model = state.get("model") if isinstance(state, dict) else None
    if not isinstance(model, dict):
        return {"names": None, "is": type(state).__name__}
    answer: Values = {"names": [str(name) for name in model]}
    answer["kinds"] = sorted({type(v).__name__ for v in [*model.values(), *_tensors_in(state)]})
    answer["has_optimizer"] = "optimizer" in state
    if set(answer["kinds"]) <= _PLAIN:
        for i, value in enumerate(model.values()):
            answer[f"m{i}"] = value.detach().float().numpy()
        flat = [_numbers_of(item) for item in _items_in(state.get("optimizer"))]
        answer["optimizer"] = torch.cat([torch.zeros(0).double(), *flat]).numpy()
    return answer


_PLAIN = {"Tensor", "Parameter"}


def _items_in(value: Any) -> Iterator[Any]:
    """What is in dicts and lists, and in bytes that torch.save has made, however deep."""
    if isinstance(value, bytes):
        with contextlib.suppress(Exception):  # other bytes
            yield from _items_in(torch.load(io.BytesIO(value), map_location="cpu"))
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _items_in(item)
    else:
        yield value


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [item for item in _items_in(value) if isinstance(item, torch.Tensor)]


def _numbers_of(item: Any) -> torch.Tensor:
    """The numbers of a tensor, or a float by itself, flat and in float64; none of anything else."""
    if not isinstance(item, torch.Tensor | float):
        return torch.zeros(0).double()
    return torch.as_tensor(item).detach().double().ravel()


def judge_save(case: Case) -> list[Finding]:
    """One file, written by rank 0, with the whole parameters under their names.

    "optimizer" may hold tensors, lists of floats, or bytes of torch.save, of whole values or of
    each rank's own. The file may be renamed to its name.
    """
    findings: list[Finding] = []
    for rank, answer in enumerate(case.answers):
        expected = ["checkpoint.pt"] if rank == 0 else []
        if not isinstance(answer.get("files"), list) or answer["files"] != expected:
            findings.append(
                Finding(
                    f"files in this rank's folder: {answer.get('files')}, expected {expected}. All "
                    f"ranks gather, rank 0 writes. {LAST_ALONE}",
                    rank,
                )
            )
        elif (changed := answers.told(answer, "changed")) != []:
            findings.append(
                Finding(
                    f"save_checkpoint changed {_listed(changed)}; training has to go on as if it "
                    "had not been called.",
                    rank,
                )
            )
    if findings:
        return findings
    answer, names = case.answers[0], _names()
    told = answer.get("names")
    if told is None:
        return [Finding(f'the file holds a {answer.get("is")}, expected a dict with "model".', 0)]
    if not isinstance(told, list) or sorted(map(str, told)) != sorted(names):
        return [Finding(f'"model": expected the names {names}, got {told}.', 0)]
    kinds = answer.get("kinds")
    if not isinstance(kinds, list) or not set(map(str, kinds)) <= _PLAIN:
        return [Finding(f"the file holds {kinds}, expected ordinary tensors only.", 0)]
    if answer.get("has_optimizer") is not True:
        return [Finding('the file has no "optimizer".', 0)]
    model, moments = _oracle(case, BEFORE)
    for name, value in zip(names, model, strict=True):
        got = answer.get(f"m{told.index(name)}")
        hint, rows = "", len(got) if isinstance(got, np.ndarray) and got.ndim else 0
        if 0 < rows < len(value) and oracle.agrees(got, value[:rows]):
            hint = "Those are the rows of one rank only. A full state dict is gathered."
        if wrong := oracle.differs(0, f"{name} in the file", got, value, hint=hint):
            return [wrong]
    for name, value in moments.items():
        missing = _num_missing(answer.get("optimizer"), value)
        if missing:
            return [
                Finding(
                    f'"optimizer": {missing} of {value.size} numbers of the {name} are nowhere in '
                    "it. Ranks gather the optimizer's state, too: rank 0 has only its own part.",
                    0,
                )
            ]
    return []


def _num_missing(saved: Any, wanted: np.ndarray) -> int:
    """How many of the numbers `wanted` are in no tensor that was saved, in any order."""
    if not is_floats(saved):
        return wanted.size
    found = np.sort(saved.astype(np.float64).ravel())
    if not len(found):
        return wanted.size
    place = np.searchsorted(found, wanted.ravel())
    near = [found[np.clip(place + shift, 0, len(found) - 1)] for shift in (-1, 0)]
    off = np.min([np.abs(n - wanted.ravel()) for n in near], axis=0)
    return int((off > oracle.RTOL["float32"] * np.abs(wanted).max()).sum())


def observe_resume(subject: Any, inputs: Values, context: Context) -> Values:
    """Saves, trains on; then loads into a model with different weights, and trains that."""
    save_checkpoint, load_checkpoint = subject
    model, optimizer = _sharded(inputs, context.device)
    _train(model, optimizer, inputs, BEFORE)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "checkpoint.pt"))
        save_checkpoint(model, optimizer, path)
        dist.barrier()
        if context.rank != 0:  # as if on a different disk
            for file in Path(folder).iterdir():
                file.unlink()
        try:
            _train(model, optimizer, inputs, AFTER)
        except RuntimeError as error:
            if "DTensor" in str(error):
                error.args = (
                    f"training after save_checkpoint fails: {error}. Did saving put other tensors "
                    "into the optimizer's own state? optimizer.state_dict() hands out its own "
                    "dicts.",
                )
            raise
        answer: Values = {f"on/{i}": value for i, value in enumerate(_whole(model))}
        other = {k.removeprefix("other/"): v for k, v in inputs.items() if k[:6] == "other/"}
        model, optimizer = _sharded(other, context.device)
        try:
            load_checkpoint(model, optimizer, path)
        except FileNotFoundError as error:
            error.strerror = f"{error.strerror} (it is on rank 0's disk only)"
            raise
        dist.barrier()
    for step in range(AFTER + 1):
        if step:
            _train(model, optimizer, inputs, 1)
        answer |= {f"p{step}/{i}": value for i, value in enumerate(_whole(model))}
    return answer


def _whole(model: nn.Module) -> list[np.ndarray]:
    """Values of all parameters, then of the buffer. A collective: all ranks must call it."""
    whole = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    return [t.detach().cpu().numpy().copy() for t in (*whole, model.seen)]  # type: ignore[misc]


def judge_resume(case: Case) -> list[Finding]:
    """After loading and after more steps, the weights equal those of a run without a stop."""
    findings: list[Finding] = []
    expected = [_oracle(case, BEFORE + step)[0] for step in range(AFTER + 1)]
    for rank, answer in enumerate(case.answers):
        for i, (name, value) in enumerate(zip(_names(), expected[-1], strict=True)):
            what = f"{name} of the run that goes on after save_checkpoint"
            if wrong := oracle.differs(rank, what, answer.get(f"on/{i}"), value):
                findings.append(wrong)
                break
        for step, values in enumerate(expected):
            when = f"{step} step{'s' * (step > 1)} after" if step else "after"
            if any(f.rank == rank for f in findings):
                break
            wrongs = (
                oracle.differs(
                    rank,
                    f"{name} {when} load_checkpoint",
                    answer.get(f"p{step}/{i}"),
                    value,
                    hint=_why_not_resumed(name, step),
                )
                for i, (name, value) in enumerate(zip(_names(), values, strict=True))
            )
            if wrong := next(filter(None, wrongs), None):
                findings.append(wrong)
                break
    return findings


def _why_not_resumed(name: str, step: int) -> str:
    if step:
        return (
            "The model was right after loading: is AdamW's state loaded, and its groups' options?"
        )
    if name == "seen":
        return "The parameters are right, this is a buffer: it has to be saved and loaded, too."
    return "Does every rank get its shards of what rank 0 has read?"


def _names() -> list[str]:
    layers = range(0, 2 * (len(SIZES) - 1), 2)
    return [*(f"{i}.{kind}" for i in layers for kind in ("weight", "bias")), "seen"]


def _oracle(case: Case, num_steps: int) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """AdamW in one process on all ranks' data, float64: the model's values and AdamW's state."""
    model = oracle.mlp(case.inputs[0], torch.float64)
    model[0].bias.requires_grad_(False)
    optimizer = _optimizer(model)
    joined = {n: np.concatenate([i[n] for i in case.inputs]).astype(np.float64) for n in "xy"}
    x, y = (torch.from_numpy(joined[name]) for name in "xy")
    for _ in range(num_steps):
        optimizer.zero_grad()
        oracle.mse(model(x), y).backward()
        optimizer.step()
        _schedule(optimizer)
    seen = np.full(3, case.inputs[0]["p0"][0, 0].item() + num_steps)
    state = [optimizer.state[p] for p in model.parameters() if p.requires_grad]
    moments = {
        f"moments {key!r}": np.concatenate([each[key].numpy().ravel() for each in state])
        for key in ("exp_avg", "exp_avg_sq")
    }
    return [*(p.detach().numpy() for p in model.parameters()), seen], moments
