"""A class graded by jobs of a Slurm cluster."""
