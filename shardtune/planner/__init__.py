"""Plan a run from its configuration alone: memory, traffic, time and what to change."""
