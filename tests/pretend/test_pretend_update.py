"""On pretended GPUs: the gradient norm, an update that cannot be compiled, a loss that is."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.built import build_model
from helpers.commands import finish
from helpers.pretended import needs_compiler, on_gpus
from helpers.ranks import config_for
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from shardtune.config import Config
from shardtune.distributed import compiling
from shardtune.distributed.join import join_world
from shardtune.model import loss
from shardtune.model.loss import LossHead, compile_loss
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


VOCABULARY = 5000


def count_graphs() -> None:
    """Compile the loss on few rows, and use it on chunks of any length."""
    compiling.can_compile = lambda _: True
    torch.compile = partial(torch.compile, backend="eager")
    width, device, dtype = 16, torch.device("cuda"), torch.bfloat16
    head: Any = LossHead(width, VOCABULARY, bias=False, device=device, dtype=dtype)
    head.batch, head.is_last = None, True
    model: Any = SimpleNamespace(get_output_embeddings=lambda: head)
    compile_loss(model, dtype, device, evaluates=True)
    graphs = counters["stats"]["unique_graphs"]
    loss._CHUNK_BYTES["cuda"] = 8 * VOCABULARY * dtype.itemsize
    for rows in (20, 8, 5):  # chunks of eight, and a last one of four or five
        for wants_gradients in (True, False):
            targets = torch.zeros(rows, dtype=torch.int64, device=device)
            given = torch.zeros(rows, width, dtype=dtype, device=device), head.weight, None, targets
            loss._SummedCrossEntropy.apply(*given, wants_gradients, "cuda")
    assert graphs == counters["stats"]["unique_graphs"] == 2


def test_a_loss_that_is_compiled_before_the_first_step_is_compiled_for_all(tmp_path):
    finish(on_gpus(1, count_graphs, cwd=tmp_path))
