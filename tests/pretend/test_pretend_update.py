"""The gradient norm, and the update that cannot be compiled, on pretended GPUs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import finish
from helpers.pretended import needs_compiler, on_gpus
from helpers.ranks import config_for
from pretend_gpu.compiled import Compiler
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from shardtune.config import Config
from shardtune.distributed import compiling
from shardtune.distributed.join import join_world
from shardtune.model.build import build_model
from shardtune.optimizers.rules import AdamW, AdamW8bit
from shardtune.training import optim
from shardtune.training.start_log import start_logging
from shardtune.training.states.replica_shards import OwnedParameters
from shardtune.training.states.sharded_optimizer import ShardedOptimizer

pytestmark = needs_compiler


class NormDtypes(TorchDispatchMode):
    """Keeps the dtypes of norms: for one in float64 a GPU copies the whole gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.linalg_vector_norm.default:
            self.names.add(str(result.dtype))
        return result


def measure_norms(out: Path) -> None:
    torch.manual_seed(0)
    measured = []
    # The sum of the large one's squares is beyond float32.
    for dtype, size in ((torch.float32, 1e-3), (torch.bfloat16, 2e16)):
        parameters = []
        for sizes in ((2, 352, 2000), (31, 12_288), (37, 1408), (100_000,), (3, 0), ()):
            parameter = nn.Parameter(torch.zeros(sizes, dtype=dtype, device="cuda"))
            # Of one sign, as sums of equal numbers lose the most.
            parameter.grad = (size * (1 + torch.rand(sizes))).to(dtype).cuda()
            parameters.append(parameter)
        exact = sum(p.grad.cpu().double().square().sum().item() for p in parameters)
        with NormDtypes() as dtypes:
            norm = optim.squared_gradients(parameters).item()
        measured.append([norm, exact, sorted(dtypes.names)])
    out.write_text(json.dumps(measured), encoding="utf-8")


def test_the_norm_of_rows_in_float32_is_that_of_float64(tmp_path):
    finish(on_gpus(1, measure_norms, tmp_path / "norms", cwd=tmp_path))
    for squared, exact, dtypes in json.loads((tmp_path / "norms").read_text(encoding="utf-8")):
        assert squared**0.5 == pytest.approx(exact**0.5, rel=1e-6)
        assert dtypes == ["torch.float32"]


def update_where(rank_that_cannot: int | None, config: Config) -> None:
    """Make the optimizer. Other ranks than `rank_that_cannot` believe that they compile it."""
    world = join_world(config)
    start_logging(config, world)
    if rank_that_cannot is not None:
        compiling.can_compile = lambda _: True
        if world.rank != rank_that_cannot:
            compiles: Any = ShardedOptimizer
            compiles.compile_update = lambda optimizer: setattr(optimizer, "is_compiled", True)
    model_config = AutoConfig.from_pretrained(config.model.path)
    owned = OwnedParameters(build_model(config, model_config, world), world)
    optimizer = optim.build_optimizer(owned, config)
    optim.compile_update(optimizer, config, world)
    assert not optimizer.is_compiled
    for parameter in owned.by_name.values():
        parameter.grad = torch.ones_like(parameter, dtype=parameter.grad_dtype)
    optimizer.step()


@pytest.mark.parametrize(
    ("rank", "line"),
    [
        (None, "nothing is compiled for this GPU ("),
        pytest.param(1, "the weights' update runs eager (rank 1: ", marks=pytest.mark.full),
    ],
)
def test_where_a_rank_cannot_compile_the_update_all_run_it_eagerly_and_say_it_once(
    rank, line, tmp_path, models
):
    given = ("model.master_dtype=bfloat16", "optimizer.name=adamw8bit")
    config = config_for(models["llama"], tmp_path, *given)
    done = on_gpus(2, update_where, rank, config, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [each for each in done.stdout.splitlines() if each.startswith("Compile: ")]
    assert len(said) == 1 and said[0].startswith(f"Compile: {line}"), done.stdout


CASES = [  # rows, columns, moments of 8 bits
    ((512, 1408), True),  # five and a half blocks
    ((512, 2048), True),
    ((512, 2048), False),
    ((1 << 18,), True),  # the moments of a vector have 16 bits
]


def count_kernels(out: Path) -> None:
    counted = []
    for sizes, eight_bit in CASES:
        launched: Counter[Any] = Counter()
        vars(torch)["compile"] = Compiler(launched.update).compile
        weight = nn.Parameter(torch.zeros(sizes, dtype=torch.bfloat16, device="cuda"))
        groups, rule = [{"params": [("weight", weight)]}], AdamW8bit if eight_bit else AdamW
        optimizer = ShardedOptimizer(groups, rule, 1, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
        optimizer.compile_update()
        launched.clear()
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        assert optimizer.is_compiled
        least = 3 * weight.nbytes + 2 * sum(optimizer.state_sizes(weight))
        moved = sum(kernel.n_bytes * times for kernel, times in launched.items())
        counted.append([launched.total(), moved / least])
    out.write_text(json.dumps(counted), encoding="utf-8")


@pytest.mark.full
def test_a_compiled_update_is_few_kernels_that_move_little_more_than_they_must(tmp_path):
    """A parameter is one call, of whole blocks and the rest of each row."""
    finish(on_gpus(1, count_kernels, tmp_path / "counted", cwd=tmp_path))
    counted = json.loads((tmp_path / "counted").read_text(encoding="utf-8"))
    for case, (kernels, times) in zip(CASES, counted, strict=True):
        assert kernels <= 5, case
        assert 1 <= times <= 1.5, (case, times)
