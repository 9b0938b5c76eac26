"""One agent per node: it launches the run, watches it and chooses the exit code."""
