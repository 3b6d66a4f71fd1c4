"""Compares verdicts before and after grading again, and replays graded notebooks."""
