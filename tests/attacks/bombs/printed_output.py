"""Prints a hundred megabytes on every rank, in one line, in many and past Python.

passes: nothing
"""

# %% put="after imports"
print("x" * (30 << 20))
for _ in range(20_000):
    print("y" * 1000)
for _ in range(200):
    os.write(1, b"z" * (1 << 17))
    os.write(2, b"\x1b[2J" * (1 << 15))
