"""Stacked experts: their products, and how ranks share them."""
