"""The criterion for task 5 of lab 1: a script that torchrun starts.

The ranks are forked from a server that has imported torch (`minidist.launch`) and get all that
torchrun's workers get: environment, arguments and a folder. That takes a third of the time of
torchrun itself, where the agent and each worker import torch anew.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data.distributed import DistributedSampler

from autograder.criteria import oracle
from autograder.criteria.base import Case, Context, Draw, Finding, Values
from minidist.errors import LaunchError
from minidist.launch import run

SCRIPT_DEADLINE_S = 120.0  # it takes about 5; a busy machine is not the student's fault
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
    """Runs the script on ranks of its own (started by rank 0) and reads the file that it leaves."""
    if context.rank != 0:
        return {}
    script = Path(path)
    if not script.is_file():
        raise FileNotFoundError(f"{script}: expected a script in {Path.cwd()}; run the cell above")
    with tempfile.TemporaryDirectory() as folder:
        data, out, log = (Path(folder, name) for name in ("in.npz", "out.npz", "log.txt"))
        np.savez(data, **inputs)
        arguments = [f"--data={data}", f"--out={out}", f"--epochs={SCRIPT_EPOCHS}",
                     f"--batch-size={SCRIPT_BATCH}", f"--lr={SCRIPT_LR}"]  # fmt: skip
        failure = _run_ranks(script, arguments, log, context.world_size)
        # A rank that does not leave its group may die after it has done its work: what was saved
        # is judged, however the script ended.
        if not out.is_file():
            said = log.read_text(errors="replace")
            if "NotImplementedError" in said:
                raise NotImplementedError
            raise RuntimeError(
                f"{script} under torchrun {failure or 'ended'} and wrote no file to --out:\n"
                f"{said[-1500:]}"
            )
        with np.load(out, allow_pickle=False) as saved:
            return {k: saved[k] for k in saved.files if k == "losses" or k in inputs}


def _run_ranks(script: Path, arguments: list[str], log: Path, nprocs: int) -> str:
    """Runs the script to its end; what went wrong, in a few words, "" if nothing.

    Raises:
        TimeoutError: it ran longer than `SCRIPT_DEADLINE_S`.
    """
    log.touch()
    start_s = time.monotonic()
    try:
        run(_be_worker, nprocs, str(script), arguments, str(log), deadline_s=SCRIPT_DEADLINE_S)
    except LaunchError as error:
        if time.monotonic() - start_s >= SCRIPT_DEADLINE_S:
            late = f"{script.name} was still running after {SCRIPT_DEADLINE_S:.0f} s"
            raise TimeoutError(late) from None
        why = str(error).partition("\nalso failed")[0].strip().splitlines()[-1]
        return f"failed on rank {error.rank} ({why})"
    return ""


def _be_worker(script: str, arguments: list[str], log: str) -> None:
    """What one of torchrun's workers does; says all it has to say in the log."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
        stream.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
    for name in [name for name in os.environ if name.startswith("MINIDIST_")]:
        del os.environ[name]
    os.environ |= {
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default",
        "ROLE_RANK": os.environ["RANK"], "ROLE_WORLD_SIZE": os.environ["WORLD_SIZE"],
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    _keep_groups()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            print(end.code, file=sys.stderr)
            raise
    except BaseException as error:
        of_script = error.__traceback__
        while of_script and of_script.tb_frame.f_code.co_filename != script:
            of_script = of_script.tb_next
        rank = os.environ.get("RANK")
        text = traceback.format_exception(error.with_traceback(of_script))
        print(f"rank {rank}: {''.join(text)}", file=sys.stderr)
        raise


_kept: list[dist.ProcessGroup] = []


def _keep_groups() -> None:
    """Lets a group live as long as its process, though the script destroys it.

    The last owner of a gloo group may be DDP's reducer. Its destructor joins gloo's thread and
    holds the GIL meanwhile, for which that thread may wait to drop the last all-reduce: on a busy
    machine a right script hung at its end.
    """
    destroy = distributed_c10d.destroy_process_group

    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        _kept.extend(distributed_c10d._world.pg_map)
        destroy(group)

    dist.destroy_process_group = destroy_process_group
    distributed_c10d.destroy_process_group = destroy_process_group


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
