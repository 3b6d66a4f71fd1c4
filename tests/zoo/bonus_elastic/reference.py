"""The reference solution.

loses: nothing
class: example
"""
