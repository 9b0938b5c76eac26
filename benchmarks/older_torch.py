#!/usr/bin/env python3
"""train_fsdp.py on a PyTorch older than the pinned one, which knows the same functions by older names.

python benchmarks/older_torch.py [arguments of train_fsdp.py]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch.distributed as dist

SCRIPT = Path(__file__).resolve().parent.parent / "train_fsdp.py"
OLDER_NAMES = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}


def main() -> None:
    for name, older in OLDER_NAMES.items():
        if not hasattr(dist, name):
            setattr(dist, name, getattr(dist, older))
    sys.argv = [str(SCRIPT), *sys.argv[1:]]
    sys.path.insert(0, str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
