"""One cell of more than a million characters.

invalid: characters, at most
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    notebook["cells"][-1]["source"] = "#" * 1_000_001
    return notebook
