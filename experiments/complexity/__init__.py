"""Time and memory of forward and reverse mode."""
