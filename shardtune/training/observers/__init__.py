"""Measurements of the steps, and where they are written."""
