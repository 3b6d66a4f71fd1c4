"""The criterion for task 5 of lab 1: a script that torchrun starts (see `launched`)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data.distributed import DistributedSampler

from autograder.criteria.common import oracle
from autograder.criteria.common.launched import (
    ELSEWHERE,
    ON_CPU,
    find_script,
    run_script,
)
from autograder.criteria.common.virtual_cluster import find_joins, judge_joins
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values
from autograder.criteria.not_started import is_not_started

SCRIPT_DEADLINE_S = 120.0  # a right script takes about 5 s; machines may be busy
SCRIPT_BATCH, SCRIPT_EPOCHS, SCRIPT_LR = 4, 3, 0.3


def draw_script(draw: Draw) -> list[Values]:
    """All data goes to rank 0, which launches the script. The last batch of a rank is smaller.

    The last epoch's loss is not the smallest, so that saving the best epoch's parameters is wrong.
    """
    rng = draw.shared()
    while True:
        sizes = (int(rng.integers(3, 7)), int(rng.integers(4, 9)), 1)
        inputs = oracle.draw_parameters(rng, sizes)
        per_rank = SCRIPT_BATCH * int(rng.integers(2, 4)) + int(rng.integers(1, SCRIPT_BATCH))
        inputs |= oracle.draw_batch(rng, draw.world_size * per_rank - 1, sizes)  # the sampler pads
        losses = _train(inputs, draw.world_size)[1]
        if losses[-1] > 1.02 * losses.min():
            return [inputs] + [{} for _ in range(draw.world_size - 1)]


def observe_script(path: Any, inputs: Values, context: Context) -> Values:
    """Rank 0 runs the script on new ranks and reads the file that the script writes."""
    if context.rank != 0:
        return {}
    script = find_script(path)
    with tempfile.TemporaryDirectory() as folder:
        data, out, log = (Path(folder, name) for name in ("in.npz", "0/out.npz", "log.txt"))
        np.savez(data, **inputs)
        arguments = [
            f"--data={data}",
            "--out=./out.npz",
            f"--epochs={SCRIPT_EPOCHS}",
            f"--batch-size={SCRIPT_BATCH}",
            f"--lr={SCRIPT_LR}",
        ]
        failure = run_script(
            script,
            arguments,
            log,
            context.world_size,
            deadline_s=SCRIPT_DEADLINE_S,
            env=ON_CPU,
            folders=Path(folder),
        )
        writers = [path.parent.name for path in Path(folder).glob("*/out.npz")]
        elsewhere = [path.read_text() for path in sorted(Path(folder).glob(f"*{ELSEWHERE}"))]
        # A rank that does not destroy its process group may die after its work is done, so the
        # saved file is judged no matter how the script ended.
        if not out.is_file():
            said = log.read_text(errors="replace")
            if is_not_started(said):
                raise NotImplementedError
            raise RuntimeError(
                f"{script} under torchrun {failure or 'ended'} and wrote no file to --out:\n"
                f"{said[-1500:]}"
            )
        with np.load(out, allow_pickle=False) as saved:
            found = {k: saved[k] for k in saved.files if k == "losses" or k in inputs}
        joins = find_joins(script, arguments, Path(folder))
        return found | {"writers": writers, "elsewhere": elsewhere, "joins": joins}


def judge_script(case: Case) -> Iterator[Finding]:
    """Final parameters and losses equal those of one process that takes the ranks' batches.

    All ranks may set the initial parameters, or rank 0 alone; losses may reach all ranks or rank 0
    alone; ranks may wait for the file or not.
    """
    given = case.inputs[0]
    if case.answers[0].get("writers") != ["0"]:
        yield Finding(
            "a rank other than 0 wrote --out, too. (The last rank has LOCAL_RANK 0 here, as on a "
            "second machine.)"
        )
    elsewhere = case.answers[0].get("elsewhere")
    if isinstance(elsewhere, list) and elsewhere:
        yield Finding(
            f"init_process_group was to meet at {elsewhere[0]}: ranks on other machines know only "
            "torchrun's place."
        )
    yield from judge_joins(case.answers[0].get("joins"))
    parameters, mean = _train(given, case.world_size)
    losses_hint = "Per epoch the mean over all samples of all ranks; the last batch is smaller."
    for i, expected in enumerate(parameters):
        hint = (
            "Do all ranks' gradients enter, with every sample once per epoch, --batch-size at a "
            "time on each rank, in the order of torch's DistributedSampler with its default "
            "settings, told each epoch from 0 on? And are these the parameters after the last "
            "epoch?"
        )
        if wrong := oracle.differs(
            0,
            f"p{i} in --out",
            case.answers[0].get(f"p{i}"),
            expected,
            hint=hint,
            terms=[given[f"p{i}"]],
        ):
            yield wrong
            losses_hint = "Other parameters give other losses: look at these first."
            break
    got = case.answers[0].get("losses")
    if wrong := oracle.differs(0, "losses in --out", got, mean, hint=losses_hint):
        yield wrong


def _train(given: Values, num_ranks: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Final parameters, and the loss of each epoch, of one process that takes all batches."""
    batches, sizes = _script_batches(given, num_ranks)
    parameters, losses = oracle.train(given, batches, SCRIPT_LR)
    per_step = np.mean(losses, axis=1).reshape(SCRIPT_EPOCHS, len(sizes))
    return parameters, np.average(per_step, axis=1, weights=sizes)


def _script_batches(
    given: Values, num_ranks: int
) -> tuple[list[list[tuple[np.ndarray, np.ndarray]]], list[int]]:
    """Each step's batches, one per rank, from torch's sampler; an epoch's batch sizes per step."""
    rows = range(len(given["x"]))
    samplers = [
        DistributedSampler(rows, num_replicas=num_ranks, rank=rank)  # type: ignore[arg-type]
        for rank in range(num_ranks)
    ]
    batches, per_rank = [], -(-len(rows) // num_ranks)
    starts = range(0, per_rank, SCRIPT_BATCH)
    for epoch in range(SCRIPT_EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders = [list(sampler) for sampler in samplers]
        for start in starts:
            own = [order[start : start + SCRIPT_BATCH] for order in orders]
            batches.append([(given["x"][rows], given["y"][rows]) for rows in own])
    return batches, [min(SCRIPT_BATCH, per_rank - start) for start in starts]
