"""Checkpoints: the only code that knows their files.

checkpoint_0001000/
  manifest.json            how the shards fit together, all digests, and all state but the tensors
  rank_00000.safetensors   one per rank, valid on its own
  huggingface/             configuration and tokenizer: with the tensors, a complete model (or
                           adapters alone, for the model that they were trained on)
  COMPLETE                 written last; holds the manifest's digest

A save runs through train_state, slices, saver, safetensors_writer, commit and manifest. A
resume runs through run_dir, resume, resume_rules (which refuses a changed key), verify and load.
export/ makes models, with assets. durable_fs makes every system call that changes a file.
"""

from shardtune.checkpoint.load import load_checkpoint
from shardtune.checkpoint.manifest import Checkpoint, open_checkpoint
from shardtune.checkpoint.resume import agree_on_checkpoint, clear_leftovers
from shardtune.checkpoint.saver import Saver
from shardtune.checkpoint.verify import verify_checkpoint

__all__ = [
    "Checkpoint",
    "Saver",
    "agree_on_checkpoint",
    "clear_leftovers",
    "load_checkpoint",
    "open_checkpoint",
    "verify_checkpoint",
]
