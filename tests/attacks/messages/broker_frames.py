"""Writes bytes that are no frame to its own connection of the emulated cluster.

The connection is closed for it, and with it go the criteria that need that cluster.

base: reference
passes: everything but ddp_buckets, ddp_overlap, ddp_scaling
"""

# %% put="before setup"
import autograder.inside.probe as probe

probe._channels.broker.sendall(b"\0" * 100_000)
