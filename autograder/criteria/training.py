"""Criteria for tasks 1, 2, 4 and 5 of lab 1: from the process group to the script.

Every rank gets rows of the dataset that no other rank has (all others are nan), so final
weights that agree with the oracle prove that the ranks' gradients met.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from autograder.criteria import oracle
from autograder.criteria.base import Case, Context, Draw, Finding, Values, compare, integer

SCRIPT_DEADLINE_S = 120.0  # it takes about 10; a busy machine is not the student's fault


# --- setup ---------------------------------------------------------------------------------------


def draw_setup(draw: Draw) -> list[Values]:
    """A private vector per rank."""
    return [{"value": draw.private(r).normal(size=5)} for r in range(draw.world_size)]


def observe_setup(setup_distributed: Any, inputs: Values, context: Context) -> Values:
    """Sets up twice, then sums the private vectors over the group that is there."""
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
    }


def judge_setup(case: Case) -> list[Finding]:
    """Right rank and size, a device that fits the backend, and a group that communicates."""
    findings: list[Finding] = []
    total = np.sum([inputs["value"] for inputs in case.inputs], axis=0)
    for rank, answer in enumerate(case.answers):
        for what, expected in (("rank", rank), ("world_size", case.world_size)):
            if answer.get(what) != expected:
                findings.append(
                    Finding(f"{what}: expected {expected}, got {answer.get(what)}.", rank)
                )
        pair = (answer.get("device"), answer.get("backend"))
        if pair not in (("cpu", "gloo"), ("cuda", "nccl"), ("cuda", "gloo")):
            findings.append(Finding(
                f"device {pair[0]!r} with backend {pair[1]!r}: use nccl where each rank has a "
                "GPU of its own, else gloo on the CPU.", rank))  # fmt: skip
        if answer.get("same_group") is not True:
            findings.append(Finding("the second call replaced the process group.", rank))
        compare(findings, rank, "sum over ranks", answer.get("sum"), total, rtol=1e-9, atol=1e-12)
    return findings


# --- wrap_model ----------------------------------------------------------------------------------

WRAP_SIZES = (5, 7, 2)


def draw_wrap(draw: Draw) -> list[Values]:
    """Every rank starts with other parameters and has other data."""
    return [
        oracle.draw_parameters(draw.private(r), WRAP_SIZES)
        | oracle.draw_batch(draw.private(r), 6, WRAP_SIZES)
        for r in range(draw.world_size)
    ]


def observe_wrap(wrap_model: Any, inputs: Values, context: Context) -> Values:
    """Parameters after wrapping, gradients after one backward."""
    model = oracle.mlp(inputs)
    wrapped = wrap_model(model, context.device)
    if not isinstance(wrapped, DistributedDataParallel):
        raise TypeError(
            "wrap_model: expected a torch.nn.parallel.DistributedDataParallel, "
            f"got {type(wrapped).__name__}"
        )
    x, y = (torch.from_numpy(inputs[k]).to(context.device) for k in "xy")
    oracle.mse(wrapped(x), y).backward()
    answer: Values = {}
    for i, p in enumerate(wrapped.parameters()):
        answer[f"p{i}"] = p.detach().cpu().numpy()
        answer[f"g{i}"] = oracle.grad_of(p)
    return answer


def judge_wrap(case: Case) -> list[Finding]:
    """Parameters are rank 0's, gradients the mean over ranks."""
    findings: list[Finding] = []
    start = oracle.parameters_of(case.inputs[0])
    local = [oracle.gradients(case.inputs[0], i["x"], i["y"]) for i in case.inputs]
    for rank, answer in enumerate(case.answers):
        for i, expected in enumerate(start):
            if not oracle.close(
                findings, rank, f"parameter {i} after wrapping", answer.get(f"p{i}"), expected,
                hint="DDP copies rank 0's parameters to every rank.",
            ):  # fmt: skip
                break
            grad = oracle.mean([grads[i] for grads in local])
            got = answer.get(f"g{i}")
            hint = oracle.explain_gradient(got, grad, local[rank][i], case.world_size)
            oracle.close(findings, rank, f"gradient {i}", got, grad, hint=hint)
    return findings


# --- train ---------------------------------------------------------------------------------------

TRAIN_SIZES = (4, 6, 1)
PER_RANK, BATCH_SIZE, LR = 10, 4, 0.2  # the last batch of an epoch has 2 samples


class RowsOfThisRank(Dataset):
    """Rows x [n, in], y [n, out]; those of other ranks are nan."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class DrawnSampler(Sampler[int]):
    """Yields the index list of the epoch that was set; epoch 0 until `set_epoch` is called.

    An epoch that does not exist counts as the last: that shows in the weights, not as an error
    in a line of the student's that is innocent.
    """

    def __init__(self, per_epoch: np.ndarray) -> None:
        self.per_epoch, self.epoch = per_epoch.tolist(), 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch's list."""
        self.epoch = min(max(int(epoch), 0), len(self.per_epoch) - 1)

    def __iter__(self):
        return iter(self.per_epoch[self.epoch])

    def __len__(self) -> int:
        return len(self.per_epoch[self.epoch])


def _draw_training(draw: Draw, num_epochs: int, same_order: bool) -> list[Values]:
    world_size, rows = draw.world_size, 2 * PER_RANK
    start = oracle.draw_parameters(draw.shared("start"), TRAIN_SIZES)
    inputs = []
    for rank in range(world_size):
        rng = draw.private(rank)
        x = np.full((world_size * rows, TRAIN_SIZES[0]), np.nan, dtype=np.float32)
        y = np.full((world_size * rows, TRAIN_SIZES[-1]), np.nan, dtype=np.float32)
        mine = slice(rank * rows, (rank + 1) * rows)
        batch = oracle.draw_batch(rng, rows, TRAIN_SIZES)
        x[mine], y[mine] = batch["x"], batch["y"]
        first = rng.permutation(rows)[:PER_RANK]
        order = [
            first if same_order else rng.permutation(rows)[:PER_RANK] for _ in range(num_epochs)
        ]
        inputs.append(start | {"x": x, "y": y, "order": np.stack(order) + rank * rows})
    return inputs


def draw_train_steps(draw: Draw) -> list[Values]:
    """Two epochs in the same order: whether `set_epoch` is called does not matter."""
    return _draw_training(draw, 2, same_order=True)


def draw_train_epochs(draw: Draw) -> list[Values]:
    """Three epochs, each in an order of its own."""
    return _draw_training(draw, 3, same_order=False)


def observe_train(train: Any, inputs: Values, context: Context) -> Values:
    """Trains torch's DDP with the student's loop; returns final parameters and losses."""
    model = oracle.mlp(inputs).to(context.device)
    ids = [context.device] if context.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids)
    order = inputs["order"]
    losses = train(
        wrapped, RowsOfThisRank(inputs["x"], inputs["y"]), DrawnSampler(order), oracle.mse,
        num_epochs=len(order), batch_size=BATCH_SIZE, lr=LR, device=context.device,
    )  # fmt: skip
    answer: Values = {f"p{i}": p.detach().cpu().numpy() for i, p in enumerate(model.parameters())}
    if losses is not None:
        answer["losses"] = np.array([float(loss) for loss in losses])
    return answer


def _oracle_training(case: Case) -> tuple[list[np.ndarray], np.ndarray]:
    """Final parameters, and the mean loss over all samples of all ranks per epoch."""
    num_epochs = len(case.inputs[0]["order"])
    starts = range(0, PER_RANK, BATCH_SIZE)
    batches = [
        [(i["x"][rows], i["y"][rows]) for i in case.inputs
         for rows in [i["order"][epoch][start : start + BATCH_SIZE]]]
        for epoch in range(num_epochs) for start in starts
    ]  # fmt: skip
    parameters, losses = oracle.train(case.inputs[0], batches, LR)
    weights = [len(step[0][0]) for step in batches]
    per_step = [w * float(np.mean(step)) for w, step in zip(weights, losses, strict=True)]
    per_epoch = np.array(per_step).reshape(num_epochs, len(starts)).sum(axis=1) / PER_RANK
    return parameters, per_epoch


def _judge_parameters(case: Case, hint: str) -> list[Finding]:
    findings: list[Finding] = []
    expected, _ = _oracle_training(case)
    for rank, answer in enumerate(case.answers):
        for i, value in enumerate(expected):
            what = f"parameter {i} after training"
            if not oracle.close(findings, rank, what, answer.get(f"p{i}"), value, hint=hint):
                break
    return findings


def judge_train_steps(case: Case) -> list[Finding]:
    """Weights equal those of one process that trains on the global batch."""
    return _judge_parameters(
        case,
        "Per batch: zero the gradients, forward through the wrapped model, backward, one SGD step "
        "with lr; keep the last, smaller batch.",
    )


def judge_train_epochs(case: Case) -> list[Finding]:
    """The same with an order per epoch, which only `set_epoch` chooses."""
    return _judge_parameters(
        case, "Call sampler.set_epoch(epoch), for epoch 0, 1, 2, …, before each first batch."
    )


def judge_train_loss(case: Case) -> list[Finding]:
    """The reported loss is the mean over all samples of all ranks."""
    findings: list[Finding] = []
    _, expected = _oracle_training(case)
    for rank, answer in enumerate(case.answers):
        oracle.close(
            findings, rank, "losses per epoch", answer.get("losses"), expected,
            hint="Sum loss × batch size over the batches, sum that and the sample count over all "
            "ranks with one all-reduce that every rank calls, then divide.",
        )  # fmt: skip
    return findings


# --- the script ----------------------------------------------------------------------------------

SCRIPT_BATCH, SCRIPT_EPOCHS, SCRIPT_LR = 4, 3, 0.3


def draw_script(draw: Draw) -> list[Values]:
    """All data goes to rank 0, which launches the script. The last batch of a rank is smaller."""
    rng = draw.shared()
    sizes = (int(rng.integers(3, 7)), int(rng.integers(4, 9)), 1)
    inputs = oracle.draw_parameters(rng, sizes)
    per_rank = SCRIPT_BATCH * int(rng.integers(2, 4)) + int(rng.integers(1, SCRIPT_BATCH))
    inputs |= oracle.draw_batch(rng, draw.world_size * per_rank, sizes)
    return [inputs] + [{} for _ in range(draw.world_size - 1)]


def observe_script(path: Any, inputs: Values, context: Context) -> Values:
    """Runs the script under torchrun (rank 0 only) and reads the file that it leaves."""
    if context.rank != 0:
        return {}
    script = Path(path)
    if not script.is_file():
        raise FileNotFoundError(f"{script}: expected a script in {Path.cwd()}; run the cell above")
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder, "in.npz"), Path(folder, "out.npz")
        np.savez(data, **inputs)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   f"--nproc-per-node={context.world_size}", str(script),
                   f"--data={data}", f"--out={out}", f"--epochs={SCRIPT_EPOCHS}",
                   f"--batch-size={SCRIPT_BATCH}", f"--lr={SCRIPT_LR}"]  # fmt: skip
        ours = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_",
            "GROUP_",
            "ROLE_",
            "MASTER_",
            "TORCHELASTIC_",
            "MINIDIST_",
        )
        env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        env["OMP_NUM_THREADS"] = "1"
        code, log = run_group(command, env, SCRIPT_DEADLINE_S)
        # A script that does not leave its group may abort after it has done its work: what it
        # saved is judged, however it ended.
        if not out.is_file():
            if "NotImplementedError" in log:
                raise NotImplementedError
            raise RuntimeError(
                f"{script} under torchrun ended with code {code} and wrote no file to --out:\n"
                f"{log[-1500:]}"
            )
        with np.load(out, allow_pickle=False) as saved:
            return {k: saved[k] for k in saved.files if k == "losses" or k in inputs}


def run_group(command: list[str], env: dict[str, str], deadline_s: float) -> tuple[int, str]:
    """Runs a command in a process group of its own; code and output, the whole group gone after.

    Raises:
        TimeoutError: it ran longer than `deadline_s`.
    """
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL, start_new_session=True, errors="replace",
    )  # fmt: skip
    try:
        log, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[-6]} was still running after {deadline_s:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # also what outlived its parent
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, log


def judge_script(case: Case) -> list[Finding]:
    """Final parameters and losses equal those of one process that takes the ranks' batches."""
    findings: list[Finding] = []
    given = case.inputs[0]
    batches, sizes = _script_batches(case)
    parameters, losses = oracle.train(given, batches, SCRIPT_LR)
    mean = [
        np.average(np.mean(losses, axis=1)[epoch * len(sizes) :][: len(sizes)], weights=sizes)
        for epoch in range(SCRIPT_EPOCHS)
    ]
    for i, expected in enumerate(parameters):
        hint = (
            "Do all ranks' gradients enter, with every sample once per epoch, in the order of "
            "torch's DistributedSampler with its default settings, told each epoch from 0 on?"
        )
        if not oracle.close(
            findings, 0, f"p{i} in --out", case.answers[0].get(f"p{i}"), expected, hint=hint
        ):
            break
    oracle.close(
        findings, 0, "losses in --out", case.answers[0].get("losses"), np.array(mean),
        hint="Per epoch the mean over all samples of all ranks; the last batch is smaller.",
    )  # fmt: skip
    return findings


def _script_batches(
    case: Case,
) -> tuple[list[list[tuple[np.ndarray, np.ndarray]]], list[int]]:
    """Every step's batch per rank, as torch's sampler deals them; samples per rank in each step."""
    given, num_ranks = case.inputs[0], case.world_size
    rows = range(len(given["x"]))
    samplers = [
        DistributedSampler(rows, num_replicas=num_ranks, rank=rank)  # type: ignore[arg-type]
        for rank in range(num_ranks)
    ]
    batches = []
    starts = range(0, len(rows) // num_ranks, SCRIPT_BATCH)
    for epoch in range(SCRIPT_EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders = [list(sampler) for sampler in samplers]
        for start in starts:
            own = [order[start : start + SCRIPT_BATCH] for order in orders]
            batches.append([(given["x"][rows], given["y"][rows]) for rows in own])
    per_rank = len(rows) // num_ranks
    return batches, [min(SCRIPT_BATCH, per_rank - start) for start in starts]
