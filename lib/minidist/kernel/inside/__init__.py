"""What of the kernel runs in the ranks and beside them."""
