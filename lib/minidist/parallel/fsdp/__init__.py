"""ZeRO-3 with torch's own `fully_shard` (FSDP2), one call per block.

    native.py      shard a model, plain or HSDP; meta device; clipping; accumulation
    state.py       full and sharded state dicts: all ranks take part, rank 0 saves
    migration.py   every option of FSDP1, and what to write instead

`minidist.parallel.zero.Zero3` is our own implementation. FSDP2 cuts each parameter along its first
dimension and keeps it as a DTensor. `Zero3` instead flattens all parameters of a unit into one line
and cuts this line.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
