"""Recursion without an end, with the interpreter's own limit taken away.

base: reference
passes: everything
"""

# %% put="after imports"
import sys

_limit = sys.getrecursionlimit()
sys.setrecursionlimit(10**9)


def _deeper(value):
    return [_deeper([value])]


_deeper(0)
