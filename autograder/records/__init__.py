"""What was graded, by which version of the grader, and how far a class has come."""
