"""Claims a check's name for a cell at the very top, so that the real one comes too late.

passes: nothing
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    checks = [c for c in notebook["cells"] if c["metadata"].get("nbgrader", {}).get("grade")]
    others = [c for c in notebook["cells"] if c not in checks]
    return notebook | {"cells": checks + others}
