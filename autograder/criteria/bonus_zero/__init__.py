"""Bonus: ZeRO-1 and ZeRO-2, an optimiser in shards. 100 points on a CPU."""
