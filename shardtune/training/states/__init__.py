"""Weights, gradients and the optimizer's state: where a rank keeps them and what it exchanges."""
