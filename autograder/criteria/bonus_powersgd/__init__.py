"""Bonus: gradient compression with PowerSGD. 100 points on a CPU."""
