"""Models made of checkpoints: `model/`, `adapter/`, `best/` and the command `export`.

model_files  which files an export has, and the checkpoint's tensors in each of them
adapter      adapters: in peft's format, or merged with the source's weights
write        the command, and the model at the end of a run
best         the model of the lowest evaluation loss
listing      export.json, which lists an export's files
"""
