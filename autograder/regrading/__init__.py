"""Verdicts that changed, and cases judged again without running a submission."""
