"""Format 3, in which code cells had other names.

invalid: expected 4
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    return {"nbformat": 3, "nbformat_minor": 0, "metadata": {}, "worksheets": [], "cells": []}
