"""What an older PyTorch lacks is given to each process that uses it, and nothing to this one."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import grimp
from conftest import REPOSITORY

from shardtune.distributed import older_torch

_ADAPTED = (
    r"\b(all_gather_single|reduce_scatter_single|varlen_attn\(|_fsdp_param_groups|torch\.compile\()"
)
_MODULE = "shardtune.distributed.older_torch"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )


def test_this_pytorch_is_left_as_it_is() -> None:
    """In a process of its own: a test may have changed a name of this one's."""
    names = ("torch.compile", "varlen.varlen_attn", "dist.all_gather_single", "guards.format_frame")
    state = f"[id(x) for x in ({', '.join(names)})] + [sorted(vars(FSDPState))]"
    code = (
        "import torch, torch.distributed as dist, torch._guards as guards\n"
        "from torch.nn.attention import varlen\n"
        "from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState\n"
        f"before = {state}\nimport {_MODULE}\nassert before == {state}\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_every_module_that_uses_an_adapted_name_imports_the_adaptation() -> None:
    graph = grimp.build_graph("shardtune")
    using = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for path in sorted(REPOSITORY.glob("shardtune/**/*.py"))
        if re.search(_ADAPTED, path.read_text(encoding="utf-8"))
    ]
    assert len(using) > 6
    lacking = [m for m in using if m != _MODULE and not graph.chain_exists(m, _MODULE)]
    assert lacking == [], f"import {_MODULE} there"


def test_an_option_that_a_function_lacks_goes_elsewhere() -> None:
    taken: list[Any] = []

    def attend(query: int, *, scale: float) -> tuple[int, float]:
        return query, scale

    adapted: Callable[..., Any] = older_torch._without("enable_gqa", attend, taken.append)
    assert adapted(3, scale=0.5, enable_gqa=True) == adapted(3, scale=0.5) == (3, 0.5)
    assert taken == [True]


def test_the_limit_of_compiled_graphs_is_only_raised() -> None:
    config: Any = importlib.import_module("torch._dynamo.config")
    with config.patch(recompile_limit=8):
        older_torch._raise_limit(64)
        older_torch._raise_limit(16)
        assert config.recompile_limit == 64
