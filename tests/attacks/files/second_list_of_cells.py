"""Names its cells twice: one list for whoever takes the first, one for whoever takes the last.

same as: starter
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    import json

    text = json.dumps(notebook)
    harmless = '{"cells": [{"cell_type": "code", "source": "1", "metadata": {}, "outputs": []}], '
    return (harmless + text[1:]).encode()
