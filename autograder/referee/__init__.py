"""The judge: outside the ranks, trusted, never run with student code."""
