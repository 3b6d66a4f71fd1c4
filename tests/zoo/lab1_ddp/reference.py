"""The reference solution.

loses: nothing
"""
