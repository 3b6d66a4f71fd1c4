"""A number of ten thousand digits, which takes Python long, or an error.

invalid: not JSON
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    return b'{"nbformat": 4, "cells": [], "metadata": {"n": ' + b"9" * 10_000 + b"}}"
