"""A step without a device: its tensors, kernels and collectives are counted."""
