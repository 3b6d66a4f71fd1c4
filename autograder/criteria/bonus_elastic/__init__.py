"""Bonus: elastic training, workers join and leave. 100 points on a CPU, with no second machine."""
