"""The submission is a folder of the notebook's name.

invalid: not a regular file
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    (folder / "lab1_ddp.ipynb").mkdir()
