"""Records of what was graded, by which version of the grader, and of a class's progress."""
