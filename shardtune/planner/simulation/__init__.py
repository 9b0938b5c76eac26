"""A step without a device, whose tensors, kernels and collectives are counted."""
