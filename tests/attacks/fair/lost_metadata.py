"""Right, saved by an editor that dropped every cell's metadata but kept the ids.

same as: reference
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    for cell in notebook["cells"]:
        cell["metadata"] = {}
    return notebook
