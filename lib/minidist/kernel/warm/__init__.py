"""Ranks that are kept warm for the next kernel."""
