"""Lab 1: distributed data parallel. 100 points on a CPU."""
