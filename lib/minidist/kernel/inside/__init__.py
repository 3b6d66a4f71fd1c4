"""The parts of the kernel that run in the ranks and in their launcher."""
