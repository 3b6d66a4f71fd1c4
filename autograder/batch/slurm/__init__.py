"""Grades a class by jobs of a Slurm cluster."""
