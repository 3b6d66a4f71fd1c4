"""Grades a whole class: many submissions in parallel, on this machine or through Slurm."""
