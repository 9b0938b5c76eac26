"""Import the script and compute the caches of transformers in the server of tests/helpers/ranks.py.

Ranks are forks of that server, so that they need not do it again."""

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
