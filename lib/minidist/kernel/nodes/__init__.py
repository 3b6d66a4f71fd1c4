"""Ranks on several nodes."""
