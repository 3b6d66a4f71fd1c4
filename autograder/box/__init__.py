"""The sandbox for student code: it hides the grader's files, cuts the network and sets limits."""
