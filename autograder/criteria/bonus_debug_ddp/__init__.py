"""Bonus: debug a broken DDP. Eleven broken programs; 100 points on a CPU."""
