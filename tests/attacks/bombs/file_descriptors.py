"""Opens files until no more can be opened, and keeps them.

passes: nothing
"""

# %% put="after imports"
held = []
with contextlib.suppress(OSError):
    while len(held) < 20_000:
        held.append(os.open("/dev/null", os.O_RDONLY))
if len(held) >= 20_000:
    print("LEAKED:", len(held))
