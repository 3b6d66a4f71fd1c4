"""What student code runs in: nothing to read, nothing to reach, limits on everything."""
