"""Let varlen attention call FlashAttention 3 where it is installed, else PyTorch's version 2.

PyTorch has both behind the same operators. Version 3 is for GPUs of compute capability 9 and has no
dropout. It adds up in one order only for heads that are narrow enough, and builds of early 2025
never do.
"""

from __future__ import annotations

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from transformers import PreTrainedConfig

from shardtune.distributed.world import World
from shardtune.errors import first_line

_why_second = ""  # why version 2 is called, or "" if version 3 is


def choose_flash_attention(model_config: PreTrainedConfig, world: World) -> None:
    """Let varlen attention call version 3 from now on, if every rank has it. Collective."""
    global _why_second
    _why_second = _activate_third(model_config, world.device)
    agree_on_flash_attention(world)


def agree_on_flash_attention(world: World) -> None:
    """Call version 2 on every rank if one of them must. Collective."""
    # Ranks with different versions would round differently, and rank 0 would log its own alone.
    reasons = world.all_gather_json(_why_second)
    rank = next((rank for rank, reason in enumerate(reasons) if reason), None)
    if rank is not None:
        keep_second(f"{reasons[rank]} on rank {rank}" if rank else reasons[rank])


def is_third() -> bool:
    return current_flash_attention_impl() == "FA3"


def keep_second(reason: str) -> None:
    """Call version 2 from now on."""
    global _why_second
    if is_third():
        restore_flash_attention_impl()
    _why_second = reason


def flash_attention_name() -> str:
    """Return the version that varlen attention calls on a GPU, and why version 3 is not called."""
    return "FlashAttention 3" if is_third() else f"FlashAttention 2, as 3 {_why_second}"


def _activate_third(model_config: PreTrainedConfig, device: torch.device) -> str:
    """Activate version 3, or return why that is impossible: words to follow its name."""
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"needs a GPU of compute capability 9, and this one has {major}.{minor}"
    settings = vars(model_config.get_text_config())
    drops = [name for name in settings if "att" in name and "drop" in name and settings[name]]
    if drops:
        return f"has no dropout, and the model {drops[0]}={settings[drops[0]]}"
    try:
        activate_flash_attention_impl("FA3")
    except Exception as error:  # the import of a package may raise anything
        return f"is not there ({first_line(error)})"
    return ""
