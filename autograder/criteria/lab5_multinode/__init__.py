"""Lab 5: several nodes. 100 points on a CPU, with no second machine."""
