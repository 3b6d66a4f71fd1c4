"""The submission is a link to the solution.

invalid: symbolic link
ci: yes
"""


# %% put="hand_in"
def hand_in(notebook, folder):
    (folder / "lab1_ddp.ipynb").symlink_to("/etc/hostname")
