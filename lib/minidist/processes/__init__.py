"""Processes that are forked from one that has torch, and end with whoever started them."""
