"""What proves that machines can train together."""
