"""Takes the rights from /tmp, where fresh ranks look for their sockets, and ends its ranks.

base: reference
passes: everything
"""

# %% put="after task1_setup"
os.chmod("/tmp", 0)
os._exit(1)
