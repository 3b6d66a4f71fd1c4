"""Asks for memory until there is no more; it is not touched, so the machine is not hurt.

passes: nothing
"""

# %% put="after imports"
held = []
try:
    while len(held) < 64:
        held.append(bytearray(256 << 20))
    print("LEAKED: 16 GiB")
except MemoryError:
    print(f"stopped at {len(held) // 4} GiB")
