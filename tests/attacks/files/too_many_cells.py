"""Ten thousand and one cells.

invalid: at most 10000
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    return notebook | {"cells": [{"cell_type": "raw", "source": "", "metadata": {}}] * 10_001}
