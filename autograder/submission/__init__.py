"""One submission, from its file to its verdicts."""
