"""Errors that a spreadsheet would take for a formula when it opens the class's table.

passes: nothing
"""


# %% replaces="task1_setup"
class Formula(Exception):
    pass


Formula.__name__ = "=HYPERLINK"


def setup_distributed():
    raise Formula('=cmd|"/c calc"!A0\n+1\n@SUM(1)\n-2')
