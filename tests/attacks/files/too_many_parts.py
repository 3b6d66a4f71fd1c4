"""Millions of empty objects, which take a hundred times their size in memory.

invalid: too many parts
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    return b'{"nbformat": 4, "cells": [' + b"{}," * 2_000_000 + b"{}]}"
