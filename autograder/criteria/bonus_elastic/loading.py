"""Criteria for task 3 of bonus_elastic, loading: the highest step whose file is whole on all ranks.

Every rank works in its own folder, as on nodes whose disks or caches differ, so a criterion can
show different files to the ranks.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autograder.criteria.bonus_elastic.saving import name_of, own_folder
from autograder.criteria.common.answers import item_of, plain
from autograder.criteria.common.checkpoint_files import (
    is_state_of,
    rising_steps,
    state_of,
    step_and_state,
)
from autograder.criteria.criterion import Case, Context, Draw, Finding, Values


def draw_agree(draw: Draw) -> list[Values]:
    """Which steps each rank sees; in the last case one file is damaged on one rank.

    The lowest step is 0, a checkpoint from before the first step.
    """
    rng = draw.shared()
    steps = [0, *rising_steps(rng, 3)]
    last = draw.world_size - 1
    lacks = int(rng.integers(1, draw.world_size)) if last else 0
    cases: list[list[list[int] | None]] = [
        [[0, 1, 2, 3] for _ in range(draw.world_size)],
        [None] * draw.world_size,  # a job's first start: there is no folder
        # One rank does not see the newest step.
        [[0, 1, 2] if rank == lacks else [0, 1, 2, 3] for rank in range(draw.world_size)],
        # Rank 0 does not see the two newest steps.
        [[0, 1] if rank == 0 else [0, 1, 2, 3] for rank in range(draw.world_size)],
        # The minimum of the ranks' newest steps is missing on the rank whose newest step is higher.
        [[0, 1, 3] if rank == last else [0, 1, 2] for rank in range(draw.world_size)],
        [[] if rank == lacks else [0, 1] for rank in range(draw.world_size)],
        [[0] if rank == last else [0, 1, 2] for rank in range(draw.world_size)],
        [[0, 1, 2, 3] for _ in range(draw.world_size)],
    ]
    spoil = [[""] * draw.world_size for _ in cases]
    others = ["best.pt", "notes.txt", f"{name_of(steps[-1] + 1)}.tmp"]  # the last: a dead writer's
    spoil[-1][lacks] = "3"
    return _for_ranks(draw, steps, cases, spoil, others=others)


def draw_damaged(draw: Draw) -> list[Values]:
    """All ranks see the same files, and the newest of them are damaged."""
    steps = rising_steps(draw.shared(), 4)
    every: list[list[int] | None] = [[0, 1, 2, 3] for _ in range(draw.world_size)]
    kinds = ("3", "32", "empty 3", "empty 32", "few bytes 32", "321", "3210")
    spoil = [[what] * draw.world_size for what in kinds]
    return _for_ranks(draw, steps, [every] * len(spoil), spoil, others=[])


def _for_ranks(
    draw: Draw,
    steps: list[int],
    cases: list[list[list[int] | None]],
    spoil: list[list[str]],
    *,
    others: list[str],
) -> list[Values]:
    rng = draw.shared("weights")
    uneven = [len(set(each)) > 1 for each in spoil]
    values: Values = {
        "steps": steps,
        "weight": rng.normal(size=500).astype(np.float32),
        "cut": float(rng.uniform(0.1, 0.9)),
        "uneven": uneven,
        "others": others,  # files that are no checkpoints
        "_cases": cases,
        "_spoil": spoil,
    }
    return [
        values | {"sees": [case[rank] for case in cases], "spoilt": [s[rank] for s in spoil]}
        for rank in range(draw.world_size)
    ]


def observe_loads(functions: Any, inputs: Values, context: Context) -> Values:
    """What every rank loads from its own folder."""
    save_together, load_together = functions
    found = []
    with own_folder() as saved:
        for step in inputs["steps"]:  # in separate folders, so no save deletes a file
            with own_folder() as folder:
                save_together(folder, step, state_of(inputs, step), keep=9)
                shutil.copytree(folder, saved, dirs_exist_ok=True)
        source: list[Any] = [str(saved)]
        dist.broadcast_object_list(source, src=0)
        for sees, spoilt, uneven in zip(
            inputs["sees"], inputs["spoilt"], inputs["uneven"], strict=True
        ):
            if uneven and not _survives(load_together, inputs, source[0]):
                found.append([])
                continue
            with _shown(inputs, source[0], sees, spoilt) as folder:
                found.append(_loaded(load_together(folder), inputs))
    return {"found": found}


@contextlib.contextmanager
def _shown(inputs: Values, source: str, sees: list[int] | None, spoilt: str) -> Iterator[Path]:
    """This rank's own folder with the files that the rank sees, some of them damaged.

    With `sees=None` the folder does not exist.
    """
    with own_folder() as folder:
        if sees is None:
            yield folder / "not-there"
            return
        for name in inputs["others"]:
            (folder / name).write_text("not a checkpoint")
        for number in sees:
            name = name_of(inputs["steps"][number])
            shutil.copy(Path(source, name), folder)
            if str(number) in spoilt:
                _spoil(folder / name, spoilt, inputs["cut"])
        dist.barrier()  # all ranks have copied from rank 0's folder, which rank 0 removes later
        yield folder


def _survives(load_together: Any, inputs: Values, source: str) -> bool:
    """Whether `load_together` skips a file that is damaged on all ranks.

    If it does not, the student already loses `elastic_damaged`. A file that is damaged on one rank
    alone would then make the other ranks wait for this rank for ever, and the same bug would cost
    a second criterion.
    """
    with _shown(inputs, source, [0, 1, 2, 3], "3") as folder:
        try:
            survives = _loaded(load_together(folder), inputs) == [inputs["steps"][2], True]
        except Exception:
            survives = False
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, survives)
    return all(everywhere)


def _spoil(file: Path, how: str, share: float) -> None:
    """Cuts a file off: before its first byte, after three bytes, or after a share of them."""
    content = file.read_bytes()
    left = 0 if "empty" in how else 3 if "few bytes" in how else int(share * len(content))
    file.write_bytes(content[:left])


def _loaded(found: Any, inputs: Values) -> list[Any]:
    """[step or -1, whether the state is right]."""
    if found is None:
        return [-1, True]
    step, state = step_and_state("load_together", found)
    if isinstance(state, dict) and isinstance(state.get("model"), dict):
        weight = state["model"].get("weight")
        if isinstance(weight, torch.Tensor) and weight.device.type != "cpu":
            raise TypeError(f"load_together: tensors belong on the CPU, got {weight.device}")
    return [step, is_state_of(state, inputs, step)]


def judge_loads(case: Case) -> list[Finding]:
    """All ranks load the highest step whose file is whole on every rank.

    They may agree step by step, tell each other all that they have, or follow rank 0.
    """
    given = case.inputs[0]
    steps = given["steps"]
    findings: list[Finding] = []
    answers = [plain(answer).get("found") for answer in case.answers]
    for number, (sees, spoilt) in enumerate(zip(given["_cases"], given["_spoil"], strict=True)):
        if given["uneven"][number] and any(item_of(found, number) == [] for found in answers):
            continue
        sees = [each or [] for each in sees]
        whole = [
            {n for n in sees[rank] if str(n) not in spoilt[rank]} for rank in range(case.world_size)
        ]
        common = set.intersection(*whole)
        right = [steps[max(common)] if common else -1, True]
        story = "; ".join(
            f"rank {rank} has whole files of steps {[steps[n] for n in sorted(w)]}"
            + (
                f", and damaged ones of {[steps[n] for n in sorted(set(sees[rank]) - w)]}"
                if set(sees[rank]) - w
                else ""
            )
            for rank, w in enumerate(whole)
        )
        for rank, found in enumerate(answers):
            got = item_of(found, number)
            if got == right:
                continue
            expected = "None" if right[0] < 0 else f"step {right[0]}"
            came = "nothing that can be read"
            if isinstance(got, list) and len(got) == 2:
                came = "None" if got[0] == -1 else f"step {got[0]}"
                came += "" if got[1] is True else " with a state that was not saved"
            findings.append(
                Finding(
                    f"{story}: expected {expected} on every rank, got {came}. It is the highest "
                    "step whose file is whole on all of them; ranks that begin at different steps "
                    "train different models.",
                    rank,
                )
            )
        if findings:
            break
    return findings
