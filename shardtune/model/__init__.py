"""A HuggingFace model, sharded: files, construction, attention, loss, FLOPs."""
