"""Show people a run: a page of its curves, and a live view in a terminal."""
