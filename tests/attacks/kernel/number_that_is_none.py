"""Names ranks by digits that are no number: an error of this cell, and of nothing else.

base: reference
passes: everything
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    cells = [c for c in notebook["cells"] if c["id"] == "imports"]
    at = notebook["cells"].index(cells[0]) + 1
    for number, line in enumerate(
        ("%%rank ²", "%%rank " + "9" * 5000, "%restart_ranks " + "9" * 5000)
    ):
        cell = {"cell_type": "code", "id": f"x{number}", "metadata": {}, "outputs": []}
        notebook["cells"].insert(at, cell | {"execution_count": None, "source": f"{line}\npass"})
    return notebook
