"""Reports on a graded class, for people."""
