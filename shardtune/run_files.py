"""The names of a run's own files in run.dir, for the run and for the tools that look at it."""

LOCK = ".lock"  # from the first start on, also after the run has ended
METRICS = "metrics.jsonl"
