"""Which keys to change where a rank runs out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from shardtune.config import Config
from shardtune.errors import OutOfMemory, first_line

_LONG_ROW = 1 << 14  # tokens; a shorter one leaves a rank's kernels few


def step_fits(config: Config) -> AbstractContextManager[None]:
    """Name the keys that need less memory if a step or an evaluation runs out of it.

    Raises:
        OutOfMemory: in place of the allocator's error.
    """
    rows, length = config.train.micro_batch_size, config.data.max_length
    keys = []
    if not config.model.keeps_inputs_alone:
        keys.append("set model.activation_checkpointing=full")
    if config.parallel.context == 1 and length >= _LONG_ROW:
        keys.append("set parallel.context, so that several ranks share each row")
    if config.parallel.expert == 1:
        keys.append("set parallel.expert if the model has experts")
    if rows > 1:
        more = "raise train.gradient_accumulation_steps as much"
        keys.append(f"lower train.micro_batch_size and {more}")
    elif config.train.gradient_accumulation_steps > 1:
        keys.append(
            "set train.gradient_accumulation_steps=1 if the log says that gradients are reduced "
            "once a step (each rank keeps them whole until then)"
        )
    return _explain_out_of_memory(
        f"a micro-batch of {rows} (train.micro_batch_size) x {length} (data.max_length) tokens",
        f"{', '.join([*keys, 'use more GPUs'])}, or start anew with another run.dir and "
        f"{' or '.join(['a lower data.max_length', *_smaller_state(config)])}",
    )


def weights_fit(config: Config) -> AbstractContextManager[None]:
    """Name what helps if the weights, or the optimizer's state of them, run out of memory.

    Raises:
        OutOfMemory: in place of the allocator's error.
    """
    on_gpu = torch.cuda.is_available() and config.lora.rank is None
    offload = "set optimizer.offload=true, " if on_gpu and not config.optimizer.offload else ""
    return _explain_out_of_memory(
        "the model with its gradients and its optimizer's state",
        f"{offload}share it among more GPUs or nodes, use some with more memory, or start anew "
        f"with another run.dir and {' or '.join([*_smaller_state(config), 'a smaller model'])}",
    )


def _smaller_state(config: Config) -> list[str]:
    """Return the settings, of those not made yet, with which the state takes less."""
    if config.lora.rank is not None:
        return []
    is_set = {
        "model.master_dtype=bfloat16": config.model.master_dtype == "bfloat16",
        "optimizer.name=adamw8bit": config.optimizer.name == "adamw8bit",
        "model.reduce_dtype=bfloat16": config.model.reduce_dtype == "bfloat16",
        "lora.rank=16": False,
    }
    return [setting for setting in is_set if not is_set[setting]]


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
