"""The format is `true`, which Python takes for a number.

invalid: format
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    return notebook | {"nbformat": True}
