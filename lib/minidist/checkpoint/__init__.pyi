from .native import load_dcp, save_dcp
from .shards import Shard, shards_of
from .store import CheckpointError, Checkpoints, Saving

__all__ = ["CheckpointError", "Checkpoints", "Saving", "Shard", "load_dcp", "save_dcp", "shards_of"]
