"""What follows from shapes, sizes and rates alone."""
