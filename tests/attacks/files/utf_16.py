"""UTF-16, as some editors write it.

invalid: not UTF-8
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    import json

    return json.dumps(notebook).encode("utf-16")
