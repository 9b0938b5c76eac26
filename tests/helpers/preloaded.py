"""Imported by the server of tests/ranks.py, so that no rank that it forks has to: the script with
all that it imports, and what transformers computes once in a process."""

from __future__ import annotations

import gc
import importlib

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

for _name in ("llama", "qwen3", "glm4_moe", "mamba"):
    importlib.import_module(f"transformers.models.{_name}.modeling_{_name}")
for _name in ("transformers.integrations.moe", "pytest", "train_fsdp"):
    importlib.import_module(_name)
get_checkpoint_conversion_mapping("llama")
# What is frozen no rank looks through, nor copies to do so.
gc.collect()
gc.freeze()
