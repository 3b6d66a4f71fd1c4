"""A hundred thousand opening brackets: a parser that recurses ends there.

invalid: nested too deeply
ci: yes
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    return b'{"nbformat": 4, "cells": ' + b"[" * 100_000
