"""What the collectives of a run move, as PyTorch dispatches them."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextmanager
def counted_collectives(out: str) -> Iterator[None]:
    """Write OUT.<rank>.json: what `Collectives` counts."""
    with Collectives() as collectives:
        yield
    path = Path(f"{out}.{os.environ.get('RANK', '0')}.json")
    path.write_text(json.dumps(collectives.totals), encoding="utf-8")


class Collectives(TorchDispatchMode):
    """Counts the collectives of this rank, and the bytes of the largest tensor of each: the
    unsharded side. Of an all-to-all it is the one that is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation.namespace in ("c10d", "_c10d_functional"):
            tensors = [x for x in tree_leaves([args, kwargs]) if isinstance(x, torch.Tensor)]
            total = self.totals[operation.name().partition("::")[2].strip("_")]
            total["count"] += 1
            if operation._opname == "alltoall_base_":
                tensors = tensors[1:]  # (output, input)
            total["bytes"] += max((tensor.nbytes for tensor in tensors), default=0)
        return result
