"""Check this project on one GPU: `make gpu-check`."""
