"""What several labs withhold: module of minidist -> the solution in it (`Lab.withheld`)."""

from __future__ import annotations

import pkgutil
from pathlib import Path

import minidist

TRAINING_LOOP = {"minidist.train.program": "its training loop"}
# Modules beside our DDP that are no part of it; any other module there is withheld.
_SHOWN = {"clipping", "join", "legacy", "native", "sync_batch_norm"}
_DATA = Path(minidist.__path__[0], "parallel", "data")
OWN_DDP = {
    f"minidist.parallel.data.{module.name}": "own DDP"
    for module in pkgutil.iter_modules([str(_DATA)])
    if module.name not in _SHOWN
} | {"minidist.parallel.data.replicas": "equal replicas"}
