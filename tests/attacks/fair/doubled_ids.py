"""Right, with one id on all cells, as a careless merge leaves them.

same as: reference
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    for cell in notebook["cells"]:
        cell["id"] = "same"
    return notebook
