"""Stacked experts: outputs and gradients, what is compiled of them, and how they are spread."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.built import simulate
from helpers.commands import finish
from helpers.configs import configured
from helpers.moe_families import FAMILIES, SMALL, build
from helpers.pretended import needs_compiler, on_gpus
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from shardtune.distributed import compiling
from shardtune.distributed.exchange import Exchange, linear_map
from shardtune.distributed.layout import Layout
from shardtune.model.facts.of_model import facts_of_model
from shardtune.model.facts.problems import expert_problems
from shardtune.model.moe import grouped_experts
from shardtune.model.moe.grouped_experts import TokenPairs, expert_outputs, gathering_forward
from shardtune.model.moe.token_exchange import SharedExperts
from shardtune.planner.simulation.simulate import Step, fake_world
from shardtune.training.states.reshard import ReshardPolicy

SIZES = [1, 7, 0, 13]
# Gates and weights at the activation; no gate; biases, behind which the weights are.
LAYOUTS: dict[str, dict[str, Any]] = {
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
    model = build_normed() if family in NORMED else build(family, **LAYOUTS[family])
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


@pytest.mark.parametrize("family", [*LAYOUTS, *NORMED])
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
    for family in (*LAYOUTS, *NORMED):
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


TINY = {"vocab_size": 16, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


UNEVEN = {"num_local_experts": 9, "intermediate_size": 10}
# It also sends tokens to experts without parameters.
LONGCAT = {"num_hidden_layers": 2, "n_routed_experts": 4, "expert_ffn_hidden_size": 16}


@pytest.mark.parametrize(
    ("family", "settings", "degree", "problem"),
    [
        ("llama", {}, 1, None),
        ("llama", {}, 2, "llama has no experts - use parallel.expert=1"),
        ("mixtral", {"num_local_experts": 6}, 3, None),
        ("mixtral", UNEVEN, 3, "their width, 10, can be cut into 4 - use a larger parallel.repl"),
        ("mixtral", {"num_local_experts": 6}, 4, "does not divide the 6 experts of mixtral - "),
        ("longcat_flash", LONGCAT, 2, "longcat_flash has no plan to spread its experts"),
    ],
)
def test_experts_that_cannot_be_spread_are_named(family, settings, degree, problem):
    with torch.device("meta"):
        small = AutoConfig.for_model(family, **TINY | settings)
        model = AutoModelForCausalLM.from_config(small)
    problems = list(expert_problems(facts_of_model(model), degree, copies=4))
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


def small_step(family: str, *more: str) -> None:
    """Simulate a micro-batch of a rank of two that spread a small model's experts.

    Before it the model goes forward twice for its attention, once for its head and to evaluate.
    """
    model_config = AutoConfig.for_model(family, **SMALL | FAMILIES[family])
    config = configured("parallel.expert=2", "data.max_length=64", *more)
    with fake_world(Layout.of(config, 2), 2) as world:
        simulate(Step(config, ReshardPolicy(False, False), world), model_config)


@pytest.mark.parametrize(("family", "layers"), [("glm4_moe", 1), ("qwen3_moe", 2)])
def test_a_layer_that_is_computed_again_does_not_bring_outputs_back(family, layers, monkeypatch):
    """So tokens and their weights travel once more, and outputs do not. Shared experts of glm4_moe
    stand behind the exchange, and would make it wait for the outputs."""
    sent: Counter[int] = Counter()
    original = Exchange.begin

    def send(self: Any, to: Any, of: Any, rows: torch.Tensor) -> Any:
        sent[rows.shape[-1]] += 1
        return original(self, to, of, rows)

    monkeypatch.setattr(Exchange, "begin", send)
    for mode, again in (("none", 0), ("full", 1)):
        sent.clear()
        small_step(family, f"model.activation_checkpointing={mode}")
        # To the experts and back, and the gradients of both; weights, and their gradients.
        rows, weights = 4 * 2 + 4 + again, 4 * 1 + 2 + again
        assert sent == {32: rows * layers, 1: weights * layers}


def test_shared_experts_run_while_tokens_travel(monkeypatch):
    events: list[str] = []
    ran: set[SharedExperts] = set()
    send, run_ahead = Exchange.begin, SharedExperts.run_ahead

    def told_send(self: Any, to: Any, of: Any, rows: torch.Tensor) -> Any:
        what = "weights" if rows.shape[-1] == 1 else "rows"
        arrive = send(self, to, of, rows)
        events.append(f"send {what}")
        return lambda: (events.append(f"{what} arrive"), arrive())[1]

    def told_run(self: Any, tokens: torch.Tensor) -> None:
        events.append("shared")
        ran.add(self)
        run_ahead(self, tokens)

    monkeypatch.setattr(Exchange, "begin", told_send)
    monkeypatch.setattr(SharedExperts, "run_ahead", told_run)
    small_step("glm4_moe", "model.activation_checkpointing=full")
    weights, rows = (["send weights", "weights arrive"], ["send rows", "rows arrive"])
    around = [*weights, "send rows", "shared", "rows arrive"]
    forward = [*around, *rows]
    # The gradients of outputs, the layer that is computed again, and the gradients of its inputs.
    assert events == [*forward * 5, *rows, *around, *rows, *weights]
    assert ran and all(shared._ahead is None for shared in ran), "nothing is held after the step"


def test_shared_experts_run_ahead_where_they_come_behind_and_have_the_same_input():
    calls: list[torch.Size] = []

    class Plain(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            calls.append(hidden.shape)
            return hidden + 1

    hidden, others = torch.zeros(2, 3, 4), torch.ones(2, 3, 4)
    module = Plain()
    shared = SharedExperts(module)
    shared.run_ahead(hidden.view(-1, 4))
    assert torch.equal(module(hidden), others) and calls == [(6, 4)]
    shared.run_ahead(hidden.view(-1, 4))
    shared.forget()
    assert torch.equal(module(others), others + 1) and calls[1:] == [(6, 4), (2, 3, 4)]

    for given in (hidden, others):  # the module first: never ahead
        calls.clear()
        assert torch.equal(module(given), given + 1)
        shared.run_ahead(given.view(-1, 4))
        assert calls == [(2, 3, 4)]

    def with_another_input(given: torch.Tensor) -> None:
        """From then on they never run ahead."""
        assert torch.equal(module(given), given + 1)
        calls.clear()
        shared.run_ahead(hidden.view(-1, 4))
        assert not calls

    shared.run_ahead(hidden.view(-1, 4))
    with_another_input(others)
    shared = SharedExperts(module := Plain())
    shared.run_ahead(hidden.view(-1, 4))
    with_another_input(hidden.add_(1))
    shared = SharedExperts(module := Plain())
    shared.run_ahead(hidden[0])
    with_another_input(hidden[1])
