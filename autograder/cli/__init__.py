"""The commands of `autograder`."""
