"""Sends pickles to the other ranks: they are all one student's, and nothing outside loads one.

base: reference
passes: everything
"""

# %% put="after task1_setup"


class _Evil:
    def __reduce__(self):
        return (exec, ("EVIL = 1",))


setup_distributed()
_objects = [None] * dist.get_world_size()
dist.all_gather_object(_objects, _Evil())
