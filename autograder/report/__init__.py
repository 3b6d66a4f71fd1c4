"""What a person reads of a graded class."""
