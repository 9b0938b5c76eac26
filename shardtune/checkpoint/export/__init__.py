"""Models made of checkpoints and of live weights: `model/`, `adapter/`, `best/`, `models/step_N/`.

model_files  which files an export has, and the checkpoint's tensors in each of them
adapter      adapters: in peft's format, or merged with the source's weights
write        the command `export`, and the model at the end of a run
live         the models that a run writes while it trains
"""
