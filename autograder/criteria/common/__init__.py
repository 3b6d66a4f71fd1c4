"""What the criteria of several labs share."""
