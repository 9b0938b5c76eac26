"""Name the keys to change if a rank runs out of memory."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from shardtune.distributed.layout import Layout
from shardtune.errors import OutOfMemory, first_line
from shardtune.optimizers.rules import smaller_rules

_LONG_ROW = 1 << 14  # tokens; kernels on a share of a shorter row are too small to be fast


def step_fits(layout: Layout) -> AbstractContextManager[None]:
    """Raise OutOfMemory, with keys that save memory, if a step or an evaluation runs out of it."""
    rows, length = layout.micro_batch_size, layout.max_length
    keys = []
    if not layout.keeps_inputs_alone:
        keys.append("set model.activation_checkpointing=full")
    if layout.row_ranks == 1 and length >= _LONG_ROW:
        keys.append("set parallel.context, so that several ranks share each row")
    if layout.expert == 1:
        keys.append("set parallel.expert if the model has experts")
    if rows > 1:
        more = "raise train.gradient_accumulation_steps as much"
        keys.append(f"lower train.micro_batch_size and {more}")
    return _explain_out_of_memory(
        f"a micro-batch of {rows} (train.micro_batch_size) x {length} (data.max_length) tokens",
        f"{', '.join([*keys, 'use more GPUs'])}, or start anew with another run.dir and "
        f"{' or '.join(['a lower data.max_length', *_smaller_state(layout)])}",
    )


def weights_fit(layout: Layout) -> AbstractContextManager[None]:
    """Raise OutOfMemory, with remedies, if the weights or the optimizer's state do not fit."""
    may_offload = layout.is_gpu and not (layout.is_lora or layout.offloads)
    offload = "set optimizer.offload=true, " * may_offload
    return _explain_out_of_memory(
        "the model with its gradients and its optimizer's state",
        f"{offload}share it among more GPUs or nodes, use some with more memory, or start anew "
        f"with another run.dir and {' or '.join([*_smaller_state(layout), 'a smaller model'])}",
    )


def _smaller_state(layout: Layout) -> list[str]:
    """Return the settings that the run does not have and with which its state takes less."""
    if layout.is_lora:
        return []
    return [
        *["model.master_dtype=bfloat16"] * (layout.master_dtype != "bfloat16"),
        *(f"optimizer.name={r.name}" for r in smaller_rules(layout.optimizer, layout.master_dtype)),
        *["model.reduce_dtype=bfloat16"] * (layout.reduce_dtype != "bfloat16"),
        "lora.rank=16",
    ]


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
