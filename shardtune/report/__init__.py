"""What a run left, for people: a page of curves, and a live view in a terminal."""
