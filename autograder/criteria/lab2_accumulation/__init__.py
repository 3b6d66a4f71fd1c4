"""Lab 2: gradient accumulation. 100 points on a CPU."""
