"""Clipping by the global norm of sharded gradients, from `minidist.precision.clip`."""

from minidist.precision.clip import clip_by_global_norm

__all__ = ["clip_by_global_norm"]
