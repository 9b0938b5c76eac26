"""Checkpoints: the only code that knows their files.

checkpoint_0001000/
  manifest.json            how the shards fit together, all digests, and all state that is not a tensor
  rank_00000.safetensors   one per rank, valid on its own
  huggingface/             configuration and tokenizer: with the tensors, all that makes the model
  COMPLETE                 written last; holds the manifest's digest
"""

from shardtune.checkpoint import durable_fs as disk
from shardtune.checkpoint.commit import move_aside
from shardtune.checkpoint.load import TRANSFER_TIMEOUT, load_checkpoint, transfer
from shardtune.checkpoint.manifest import (
    ASSETS,
    Checkpoint,
    Chunk,
    DamagedCheckpoint,
    open_checkpoint,
    read_chunk,
    read_tensor,
)
from shardtune.checkpoint.resume import agree_on_checkpoint, delete_unfinished, set_aside
from shardtune.checkpoint.safetensors_writer import DTYPES, write_safetensors
from shardtune.checkpoint.saver import Saver
from shardtune.checkpoint.verify import verify_checkpoint

__all__ = [
    "ASSETS",
    "DTYPES",
    "TRANSFER_TIMEOUT",
    "Checkpoint",
    "Chunk",
    "DamagedCheckpoint",
    "Saver",
    "agree_on_checkpoint",
    "delete_unfinished",
    "disk",
    "load_checkpoint",
    "move_aside",
    "open_checkpoint",
    "read_chunk",
    "read_tensor",
    "set_aside",
    "transfer",
    "verify_checkpoint",
    "write_safetensors",
]
