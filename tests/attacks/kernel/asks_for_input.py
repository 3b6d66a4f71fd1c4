"""Waits for somebody to type; where nobody can, that is an error at once.

base: reference
passes: everything
"""

# %% put="after imports"
input("the password, please: ")

# %% put="after imports"
# %debug
