"""Run train_fsdp.py on PyTorch 2.11, in which some functions have older names or fewer options.

python -m distTest.workloads.older_torch [arguments of train_fsdp.py]
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
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.attention import varlen

SCRIPT = Path(__file__).resolve().parents[2] / "train_fsdp.py"
OLDER_NAMES = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


def with_grouped_keys(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Give the `varlen_attn` of 2.11 the option `enable_gqa` of 2.12, by repeating the heads of
    keys and values.

    Tensors are (tokens, heads, width).
    """

    def attend_in_groups(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *rest: Any,
        enable_gqa: bool,
        **options: Any,
    ) -> Any:
        groups = query.shape[1] // key.shape[1] if enable_gqa else 1
        return attend(
            query, *(x.repeat_interleave(groups, 1) for x in (key, value)), *rest, **options
        )

    return attend_in_groups


def adapt() -> None:
    """Give PyTorch 2.11 what this project uses of 2.13, before the project is imported."""
    for name, older in OLDER_NAMES.items():
        if not hasattr(dist, name):
            setattr(dist, name, getattr(dist, older))
    if "enable_gqa" not in inspect.signature(varlen.varlen_attn).parameters:
        varlen.varlen_attn = with_grouped_keys(varlen.varlen_attn)
    if not hasattr(FSDPState(), "_fsdp_param_groups"):  # one group then, or none

        def groups(state: Any) -> list[Any]:
            return [state._fsdp_param_group] if state._fsdp_param_group else []

        state_class: Any = FSDPState
        state_class._fsdp_param_groups = property(groups)


def main() -> None:
    adapt()
    sys.argv = [str(SCRIPT), *sys.argv[1:]]
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
