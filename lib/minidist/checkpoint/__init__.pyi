from .native import load_dcp, save_dcp
from .saving import CheckpointError, Saving
from .shards import Shard, shards_of
from .store import Checkpoints

__all__ = ["CheckpointError", "Checkpoints", "Saving", "Shard", "load_dcp", "save_dcp", "shards_of"]
