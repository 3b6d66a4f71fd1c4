"""Lab 3: sharded training. 100 points on a CPU, and 3 extra on a GPU."""
