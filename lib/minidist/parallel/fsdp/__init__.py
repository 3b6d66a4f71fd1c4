"""ZeRO-3 with torch's own `fully_shard` (FSDP2), one call per block.

    native.py      shard a model, plain or HSDP; meta device; clipping; accumulation
    state.py       full and sharded state dicts: all ranks take part, rank 0 saves
    migration.py   every option of FSDP1, and what to write instead

`minidist.parallel.zero.Zero3` is our own implementation. FSDP2 cuts each parameter along its first
dimension and keeps it as a DTensor. `Zero3` instead flattens all parameters of a unit into one line
and cuts this line.
"""

from __future__ import annotations

from minidist.parallel.fsdp.migration import FSDP1_OPTIONS, Migration, fsdp1_to_fsdp2
from minidist.parallel.fsdp.native import clip_grad_norm_, initialise, no_sync, shard_model
from minidist.parallel.fsdp.state import (
    full_state_dict,
    load_full_state_dict,
    load_sharded,
    save_sharded,
)

__all__ = [
    "FSDP1_OPTIONS",
    "Migration",
    "clip_grad_norm_",
    "fsdp1_to_fsdp2",
    "full_state_dict",
    "initialise",
    "load_full_state_dict",
    "load_sharded",
    "no_sync",
    "save_sharded",
    "shard_model",
]
