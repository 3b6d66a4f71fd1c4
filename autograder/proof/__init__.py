"""Proves that the criteria are right, with submissions that the criteria must or must not fail."""
