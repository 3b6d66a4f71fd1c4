"""Leaves files in every shared place for the next submission, which would print them.

passes: nothing
"""

# %% put="after imports"
POISON = "POI" + "SON"
for place in ("/tmp", "/dev/shm", "/run", "/tmp/work", os.path.expanduser("~"), "/"):
    name = os.path.join(place, f"left-by-an-attack-{os.environ['RANK']}")
    if os.path.exists(name):
        print("LEAKED: found what another submission has left in", place)
    with contextlib.suppress(OSError):
        open(name, "w").write(POISON)
