"""State dicts of FSDP2 models: full for other programs, sharded to resume training.

The right way to save a full state dict, on all ranks::

    state = full_state_dict(model, optimizer)   # collective: EVERY rank calls it
    if dist.get_rank() == 0:                    # only the saving is for rank 0
        torch.save(state, path)

If the first line were also under the `if`, rank 0 would wait for ever in an all-gather, because the
other ranks do not call it.
Sharded checkpoints use torch.distributed.checkpoint: each rank writes its own shards, and any
number of ranks can read them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)


def full_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Whole, unsharded tensors in CPU memory of rank 0; the other ranks get empty dicts.

    Collective: every rank must call it.

    Returns:
        {"model": …} and, with an optimiser, {"optimizer": …}, keyed by the names of parameters.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=options)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)
    return state


def load_full_state_dict(
    model: nn.Module, state: dict[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Load the result of `full_state_dict`. Only rank 0 needs it; other ranks pass an empty dict.

    Collective: rank 0 sends each rank its shards, so no other rank needs memory for the whole.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state.get("model", {}), options=options)
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state.get("optimizer", {}), options=options)


def save_sharded(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every rank writes its shards into a folder that all ranks share. Collective."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(folder))


def load_sharded(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load what any number of ranks have saved with `save_sharded`. Collective."""
    # DCP loads in place, into the state dict of this model with its current sharding.
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=str(folder))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
