"""A whole class: many submissions, side by side, on this machine or through Slurm."""
