"""The bonus as it was handed out, with nothing done.

base: starter
loses: everything
class: example
"""
