"""Say which keys to change where the weights or a step do not fit the memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from shardtune.config import Config
from shardtune.errors import OutOfMemory, first_line


def step_fits(config: Config) -> AbstractContextManager[None]:
    """Name the keys that need less memory if a step or an evaluation runs out of it.

    Raises:
        OutOfMemory: in place of the allocator's error.
    """
    rows, length = config.train.micro_batch_size, config.data.max_length
    return _explain_out_of_memory(
        f"a micro-batch of {rows} (train.micro_batch_size) x {length} (data.max_length) tokens",
        "set model.activation_checkpointing=full, lower train.micro_batch_size and raise "
        "train.gradient_accumulation_steps as much, use more GPUs, or start anew with another "
        "run.dir and a lower data.max_length",
    )


def weights_fit() -> AbstractContextManager[None]:
    """Name what helps if the weights, or the optimizer's state of them, run out of memory.

    Raises:
        OutOfMemory: in place of the allocator's error.
    """
    return _explain_out_of_memory(
        "the model with its gradients and its optimizer's state",
        "share it among more GPUs or nodes, use some with more memory, or a smaller model",
    )


@contextmanager
def _explain_out_of_memory(subject: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except OutOfMemory:
        raise
    except Exception as error:  # a CPU's allocator and the mapping of files raise various classes
        is_known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not is_known and "t allocate memory" not in str(error):
            raise
        raise OutOfMemory(
            f"{subject} does not fit the memory ({first_line(error)}) - {remedy}"
        ) from error
