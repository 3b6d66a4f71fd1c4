"""Twenty-one megabytes of outputs.

invalid: too big
ci: yes
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    return b'{"cells": [' + b" " * (21 << 20)
