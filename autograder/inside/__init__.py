"""What of the grader runs beside student code, in the box: it holds no secret."""
