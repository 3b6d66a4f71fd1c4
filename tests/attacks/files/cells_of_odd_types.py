"""Cells that are numbers, and sources that are objects.

invalid: is not a cell
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    return notebook | {"cells": [7, None, *notebook["cells"]]}
