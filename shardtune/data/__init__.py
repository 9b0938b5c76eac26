"""Records become rows of tokens."""
