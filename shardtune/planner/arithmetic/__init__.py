"""Arithmetic on shapes, sizes and rates, without a simulated step."""
