"""Right, saved by an editor that kept neither ids nor metadata: only text and order are left.

base: reference
passes: everything
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    for cell in notebook["cells"]:
        cell["metadata"] = {}
        del cell["id"]
    return notebook | {"nbformat_minor": 4}
