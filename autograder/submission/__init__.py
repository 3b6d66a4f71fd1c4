"""Grades one submission, from its file to its verdicts."""
