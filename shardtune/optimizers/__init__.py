"""Optimizers: their updates, and the states that they keep of each weight, on one rank."""
