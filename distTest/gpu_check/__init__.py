"""Everything of this project that one GPU can show, in under nine minutes: `make gpu-check`."""
