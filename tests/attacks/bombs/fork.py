"""Forks without end: more processes than a submission may have end its ranks.

passes: nothing
"""

# %% put="after imports"
while True:
    with contextlib.suppress(OSError):
        os.fork()
