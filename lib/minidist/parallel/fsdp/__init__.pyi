from .migration import FSDP1_OPTIONS, Migration, fsdp1_to_fsdp2
from .native import clip_grad_norm_, initialise, no_sync, shard_model
from .state import full_state_dict, load_full_state_dict, load_sharded, save_sharded

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
