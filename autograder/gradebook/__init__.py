"""nbgrader's gradebook, and what goes from it to students and to an LMS."""
