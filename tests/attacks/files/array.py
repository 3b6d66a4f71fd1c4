"""A .npy file of objects with a notebook's name.

invalid: not
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    import io

    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, np.array([{"cells": []}], dtype=object), allow_pickle=True)
    return buffer.getvalue()
