"""Checkpoints: the only code that knows their files.

checkpoint_0001000/
  manifest.json            how the shards fit together, and all state that is not a tensor
  rank_00000.safetensors   one per rank, valid on its own
  COMPLETE                 written last; holds the manifest's digest
"""

from .choose import agree_on_checkpoint, set_aside
from .files import Checkpoint
from .training_state import load_checkpoint, save_checkpoint

__all__ = ["Checkpoint", "agree_on_checkpoint", "load_checkpoint", "save_checkpoint", "set_aside"]
