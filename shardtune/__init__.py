"""The library that train_fsdp.py is built from."""
