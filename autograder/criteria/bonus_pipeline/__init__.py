"""Bonus: pipeline parallelism from scratch. 100 points on a CPU."""
