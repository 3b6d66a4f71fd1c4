"""The torch-native way: torch.distributed.checkpoint (DCP) inside our atomic folders.

DCP plans which rank writes what, writes one file per rank, and reads DTensors back in any layout.
It does not handle a job that dies while it writes: `Checkpoints` adds that. `get_state_dict` gives
parameters and optimizer state under names, not numbers, so that they can be read at a different
world size; it is a collective, so every rank has to call it. (Asking for a *full* state dict under
`if rank == 0` hangs for the same reason: the other ranks' parts have to be sent.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from minidist.checkpoint.store import Checkpoints


def save_dcp(
    checkpoints: Checkpoints, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Path:
    """Save a model and its optimizer, sharded (FSDP2, tensor parallel) or not. Collective."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    group = checkpoints.group

    def write(folder: Path) -> None:
        dcp.save(state, checkpoint_id=folder, process_group=group, no_dist=group is None)

    return checkpoints.save_files(step, write)


def load_dcp(
    checkpoints: Checkpoints, model: nn.Module, optimizer: torch.optim.Optimizer
) -> int | None:
    """Load the newest undamaged checkpoint of `save_dcp`, whatever layout it was saved in.

    Returns:
        The step of the checkpoint; None if there is no checkpoint. Collective.
    """
    found = checkpoints.latest()
    if found is None:
        return None
    step, folder = found
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    group = checkpoints.group
    dcp.load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return step
