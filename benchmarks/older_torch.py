#!/usr/bin/env python3
"""train_fsdp.py on PyTorch 2.11, older than the pinned one, which knows the same functions by older names or with less.

python benchmarks/older_torch.py [arguments of train_fsdp.py]
"""

from __future__ import annotations

import inspect
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import varlen

SCRIPT = Path(__file__).resolve().parent.parent / "train_fsdp.py"
OLDER_NAMES = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


def with_grouped_keys(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`varlen_attn` as of 2.12, which shares each key's head among the query's heads (`enable_gqa`), on that of 2.11:
    (tokens, heads, width) each, and the keys' and values' heads are repeated."""

    def attend_in_groups(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: Any,
        enable_gqa: bool,
        **options: Any,
    ) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1] if enable_gqa else 1
        return attend(
            query, *(x.repeat_interleave(groups, 1) for x in (key, value)), *rest, **options
        )

    return attend_in_groups


def main() -> None:
    for name, older in OLDER_NAMES.items():
        if not hasattr(dist, name):
            setattr(dist, name, getattr(dist, older))
    if "enable_gqa" not in inspect.signature(varlen.varlen_attn).parameters:
        varlen.varlen_attn = with_grouped_keys(varlen.varlen_attn)
    sys.argv = [str(SCRIPT), *sys.argv[1:]]
    sys.path.insert(0, str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
