"""Bonus: a tensor-parallel transformer layer. 100 points on a CPU."""
