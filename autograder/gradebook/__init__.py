"""nbgrader's gradebook, its feedback for students, and its exports to an LMS."""
