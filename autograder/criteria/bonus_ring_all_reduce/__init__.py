"""Bonus: a ring all-reduce out of sends and receives. 100 points on a CPU."""
