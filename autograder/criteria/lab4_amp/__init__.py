"""Lab 4: automatic mixed precision. 100 points on a CPU, and 5 extra on a GPU."""
