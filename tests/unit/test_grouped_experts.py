"""The outputs of stacked experts on sorted rows, their gradients, and what is compiled of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.commands import finish
from helpers.configs import configured
from helpers.moe_families import build
from helpers.pretended import needs_compiler, on_gpus
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardtune.distributed import compiling
from shardtune.distributed.exchange import linear_map
from shardtune.distributed.layout import Layout
from shardtune.model.moe import grouped_experts
from shardtune.model.moe.grouped_experts import TokenPairs, expert_outputs, gathering_forward
from shardtune.planner.simulation.simulate import Step, fake_world, simulate
from shardtune.training.states.reshard import ReshardPolicy

SIZES = [1, 7, 0, 13]
# Gates and weights at the activation; no gate; biases, behind which the weights are.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 24},
    "nemotron_h": {
        "num_hidden_layers": 2,
        "layers_block_type": ["moe", "attention"],
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt_oss": {},
}
# One has a norm behind each expert, and no class for text alone. transformers before 5.20 lacks it.
NORMED = ["muse_spark"] if find_spec("transformers.models.muse_spark") else []


def build_normed() -> Any:
    from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts

    small = MuseSparkTextConfig(moe_hidden_size=32, moe_intermediate_size=16, num_local_experts=4)
    return MuseSparkExperts(small)


def experts_of(family: str) -> list[Any]:
    torch.manual_seed(0)
    model = build_normed() if family in NORMED else build(family, **FAMILIES[family])
    modules: list[Any] = [
        module for module in model.modules() if grouped_experts.are_stacked(type(module))
    ]
    for parameter in (p for module in modules for p in module.parameters()):
        torch.nn.init.normal_(parameter, std=0.1)
    return modules


def routed(experts: Any, count: int = sum(SIZES)) -> list[torch.Tensor]:
    """Return rows, weights, the expert of each row and the ends of the experts."""
    down = experts.down_proj
    width = down.shape[-1] if experts.is_transposed else down.shape[-2]
    ends = torch.tensor(SIZES).cumsum(0, dtype=torch.int32)
    ends[-1] = count
    rows, weights = torch.randn(count, width), torch.rand(count, 1)
    ids = torch.arange(len(SIZES)).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))
    return [rows.requires_grad_(), weights.requires_grad_(), ids, ends]


@pytest.mark.parametrize("family", [*FAMILIES, *NORMED])
def test_outputs_and_gradients_are_those_of_each_expert_alone(family):
    """By transformers' loop over the experts, whose forward is a reference of its own."""
    experts = experts_of(family)[0]
    rows, weights, ids, ends = routed(experts)
    gradient = torch.randn_like(rows)
    inputs = [rows, weights, *experts.parameters()]
    experts.config._experts_implementation = "eager"
    outputs = {
        "grouped": expert_outputs(experts, rows, weights, ids, ends),
        "alone": experts(rows, ids.unsqueeze(-1), weights),
    }
    for found, expected in zip(
        *([output, *torch.autograd.grad(output, inputs, gradient)] for output in outputs.values()),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    output = expert_outputs(experts.bfloat16(), rows.bfloat16(), weights, ids, ends)
    assert output.dtype == torch.bfloat16  # though routers have weights of float32


def assert_gathers_equal_the_loop(device: str) -> None:
    """Hold outputs and gradients against transformers' loop over the experts.

    Choices beyond the experts add nothing and get no gradient; two of the loops know none.
    """
    for family in (*FAMILIES, *NORMED):
        experts, beyond = experts_of(family)[0], family in ("mixtral", "muse_spark")
        rows, *_ = routed(experts)
        choices = torch.stack([torch.randperm(len(SIZES) + beyond)[:2] for _ in rows]).to(device)
        experts, gradient = experts.to(device), torch.randn_like(rows).to(device)
        rows, weights = (
            x.detach().to(device).requires_grad_() for x in (rows, torch.rand(len(rows), 2))
        )
        inputs = [rows, weights, *experts.parameters()]
        experts.config._experts_implementation = "eager"
        results = [
            [output, *torch.autograd.grad(output, inputs, gradient)]
            for forward in (partial(gathering_forward, experts), experts.forward)
            for output in [forward(rows, choices, weights)]
        ]
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-6, atol=2e-6)


def test_gathers_have_the_outputs_and_gradients_of_transformers_loop():
    assert_gathers_equal_the_loop("cpu")


@needs_compiler
def test_gathers_have_them_on_a_gpu(tmp_path):
    finish(on_gpus(1, assert_gathers_equal_the_loop, "cuda", cwd=tmp_path))


class Products(TorchDispatchMode):
    """Counts grouped products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._grouped_mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("family", "again"), [("mixtral", 1), ("nemotron_h", 1), ("gpt_oss", 2)])
def test_experts_that_are_computed_again_leave_out_a_product_that_no_gradient_needs(family, again):
    experts = experts_of(family)[0]
    inputs = routed(experts)

    def products(is_again: bool) -> int:
        with Products() as counter:
            output: Any = (
                checkpoint(expert_outputs, experts, *inputs, use_reentrant=False)
                if is_again
                else expert_outputs(experts, *inputs)
            )
            output.square().sum().backward()
        return counter.count

    assert products(is_again=False) == 2 + 4
    assert products(is_again=True) == 2 + 4 + again


def test_the_activation_keeps_its_inputs_alone():
    experts = experts_of("mixtral")[0]
    kept: Counter[torch.Size] = Counter()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.shape] += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        expert_outputs(experts, *routed(experts))
    inner, rows = experts.down_proj.shape[-1], sum(SIZES)
    assert kept[torch.Size([rows, 2 * inner])] == 1  # gate and up
    assert kept[torch.Size([rows, inner])] == 1  # what the last product multiplies
    assert kept[torch.Size([rows, 1])] == 1


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Compile for CPUs what is compiled for GPUs, and count PyTorch's graphs."""
    monkeypatch.setattr(compiling, "_COMPILED", "cpu")
    assert compiling.can_compile(torch.device("cpu"))
    torch._dynamo.reset()
    stats: Counter[str] = torch._dynamo.utils.counters["stats"]
    stats.clear()
    yield stats
    torch._dynamo.reset()


@pytest.mark.parametrize("family", [pytest.param("mixtral", marks=pytest.mark.full), "nemotron_h"])
def test_one_compiled_function_serves_all_layers_and_equals_the_eager_one(
    family, graphs, monkeypatch
):
    """Layers that FSDP2 has given a class of their own, with rows of any number."""
    layers = [experts_of(family)[0] for _ in range(10)]  # more than a function is compiled anew for

    def results(number: int) -> list[torch.Tensor]:
        experts, count = layers[number], 8 + 2 * number
        torch.manual_seed(number)
        rows, weights, ids, ends = routed(experts, count)
        output = expert_outputs(experts, rows, weights, ids, ends)
        pairs = TokenPairs(torch.randperm(count), torch.Size([count // 2, 2]))
        part = F.pad(output, (0, 0, 0, number))[:count]  # a view, of another base in each layer
        output = linear_map(pairs.sum_by_token, pairs.token_by_pair, part)
        inputs = [rows, weights, *experts.parameters()]
        return [output, *torch.autograd.grad(output.square().sum(), inputs)]

    with monkeypatch.context() as patch:
        patch.setattr(compiling, "_COMPILED", "cuda")
        eager = [results(number) for number in range(len(layers))]
    assert not graphs["unique_graphs"]
    with fake_world(Layout(1), 1):
        for experts in layers:
            fully_shard(experts)
            experts.unshard()
        compiled = [results(number) for number in range(len(layers))]
    assert graphs["unique_graphs"] == 3
    for one, other in zip(eager, compiled, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_plan_compiles_nothing(graphs):
    """Its tensors have no contents, whatever device they pretend to be on."""
    config = configured("parallel.expert=2", "data.max_length=64")
    model_config = build("mixtral").config
    with fake_world(Layout.of(config, 2), 2) as world:
        simulate(Step(config, ReshardPolicy(False, False), world), model_config)
    assert not graphs["unique_graphs"]
