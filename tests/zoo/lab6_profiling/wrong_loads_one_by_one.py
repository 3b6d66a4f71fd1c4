"""Is a generator, but nothing happens ahead: each batch is made when the loop asks for it.

loses: prof_prefetch
"""


# %% replaces="task4_prefetch"
def prefetch(batches, depth):
    yield from batches
