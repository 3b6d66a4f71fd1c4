"""Lab 6: profiling and performance. 100 points on a CPU, and 3 extra on several GPUs."""
