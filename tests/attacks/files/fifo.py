"""The submission is a named pipe: whoever opens it to read waits for ever.

invalid: regular file
ci: yes
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    import os

    os.mkfifo(folder / "lab1_ddp.ipynb")
