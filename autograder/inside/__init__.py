"""The part of the grader that runs in the box, beside student code: it holds no secret."""
