"""Forks processes that already have torch and end with their starter; finds and ends processes."""
