"""Right, with the solutions moved up: task 6 comes first, tasks 3 and 4 last.

base: reference
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    cells = notebook["cells"]
    first = next(n for n, c in enumerate(cells) if c["id"] == "helpers") + 1
    moved = [
        cell
        for cell in cells
        if cell["metadata"].get("nbgrader", {}).get("solution")
        and cell["cell_type"] == "code"
        and cell["id"] not in ("task5_script", "task7_ddp")  # they need what stands before them
    ]
    rest = [cell for cell in cells if cell not in moved]
    first = rest.index(cells[first - 1]) + 1
    late = ["task3_sampler", "task4_train"]  # task 4 names task 3's class
    moved = [cell for cell in moved if cell["id"] not in late][::-1] + [
        cell for cell in moved if cell["id"] in late
    ]
    return notebook | {"cells": rest[:first] + moved + rest[first:]}
