"""Measure what training takes of a machine, by shardtune and by others."""
