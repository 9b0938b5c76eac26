"""Run train_fsdp.py and count its collectives and the rows through its head, by watching PyTorch's
operators.

torchrun --nproc_per_node=2 -m benchmarks.traffic OUT VOCABULARY [arguments of
train_fsdp.py]

Each rank writes OUT.<rank>.json: for each collective the calls and the bytes of its largest
tensor, which is the one that is gathered or reduced; and as `head` the rows of all products whose
width is the vocabulary.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_fsdp
from shardtune.distributed.exit_code import run

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm.default)


class Counter(TorchDispatchMode):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.totals: defaultdict[str, dict[str, int]] = defaultdict(
            lambda: {"count": 0, "bytes": 0}
        )

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation.namespace in ("c10d", "_c10d_functional"):
            tensors = [
                leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)
            ]
            name = operation.name().partition("::")[2].strip("_")
            entry = self.totals[name]
            entry["count"] += 1
            entry["bytes"] += max(
                (tensor.numel() * tensor.element_size() for tensor in tensors), default=0
            )
        elif operation in PRODUCTS and result.shape[-1] == self.vocabulary:
            self.totals["head"]["count"] += result.shape[0]
        return result


def main() -> None:
    out, vocabulary = Path(f"{sys.argv[1]}.{os.environ.get('RANK', '0')}.json"), int(sys.argv[2])
    sys.argv = ["train_fsdp.py", *sys.argv[3:]]
    counter = Counter(vocabulary)
    with counter:
        train_fsdp.main()
    out.write_text(json.dumps(counter.totals), encoding="utf-8")


if __name__ == "__main__":
    run(main)
