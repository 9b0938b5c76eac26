"""What one GPU can show of this project: `make gpu-check`."""
