"""What several labs withhold: module of minidist -> what it would answer (`Lab.withheld`)."""

from __future__ import annotations

TRAINING_LOOP = {"minidist.train.program": "its training loop"}
OWN_DDP = {
    f"minidist.parallel.data.{name}": "own DDP"
    for name in ("naive", "flat", "overlapped", "bucketed", "buckets", "graph")
} | {"minidist.parallel.data.replicas": "equal replicas"}
