"""What is compiled and what checkpointing keeps, and that the rest runs eager, said once."""

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.commands import REPOSITORY, finish
from helpers.moe_families import build
from helpers.ranks import on_ranks
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor
from torch._inductor.async_compile import get_compile_threads
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from distTest.workloads.tiny import tiny_config
from shardtune.distributed import compiling
from shardtune.distributed.compiling import (
    can_compile,
    compile_for_all_lengths,
    compiled_or_eager,
)
from shardtune.distributed.layout import Layout
from shardtune.errors import RunFailed
from shardtune.model import documents
from shardtune.model.compiled_layers import compile_layers
from shardtune.model.documents.attention import DOCUMENT_ATTENTION
from shardtune.model.parts import decoder_layers
from shardtune.model.recomputation import kept_operators

WIDTH = 32
NARROW = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "use_cache": False,
}
# Without code for this CPU. The second takes graphs apart as Inductor does.
GRAPHS_ALONE, PARTITIONED = "eager", "aot_eager_decomp_partition"


@pytest.fixture(autouse=True)
def compiled_anew(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    for name in ("shardtune", "shardtune.node"):
        caplog.set_level(logging.INFO, name)
    torch._dynamo.reset()
    can_compile.cache_clear()
    counters.clear()
    with functorch_config.patch(
        force_non_lazy_backward_lowering=False, aggressive_recomputation=False
    ):
        yield
    torch._dynamo.reset()
    can_compile.cache_clear()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("shardtune")]


def small(name: str) -> Any:
    """Return a narrow model with the layers of this one, which attends by document."""
    config = AutoConfig.from_pretrained(REPOSITORY / "tests/data/configs" / name)
    for key, value in NARROW.items():
        if hasattr(config, key):
            setattr(config, key, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    model.set_attn_implementation(DOCUMENT_ATTENTION)
    return model


def compile_with(
    model: Any,
    backend: Any,
    monkeypatch: pytest.MonkeyPatch,
    device: str = "cpu",
    setting: Any = "auto",
    checkpointing: str = "none",
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(compiling, "can_compile", lambda _: True)
    layout = Layout(2, checkpointing=checkpointing)
    world: Any = SimpleNamespace(
        device=torch.device(device), layout=layout, all_gather_json=lambda x: [x, x]
    )
    compile_layers(decoder_layers(model), setting, world)


def loss_of(model: Any, tokens: int = 17) -> torch.Tensor:
    positions = torch.cat([torch.arange(5), torch.arange(tokens - 5)])[None]
    with documents.of(documents.row_of([5, tokens - 5])):
        logits = model(input_ids=torch.arange(tokens)[None], position_ids=positions).logits
    return logits.logsumexp(-1).sum()


@pytest.mark.parametrize(
    ("name", "graphs"),
    # Before and behind the call of attention: in the layer and in its module. GLM's first layer is
    # dense.
    [
        ("llama-3-8b", 4),
        pytest.param("qwen3-30b-a3b", 4, marks=pytest.mark.full),
        ("glm-4.5-air", 5),
    ],
)
def test_a_layer_is_a_few_graphs_for_all_lengths_that_break_at_attention_alone(
    name, graphs, monkeypatch
):
    model = small(name)
    expected = [loss_of(model, tokens).item() for tokens in (12, 17, 30)]
    compile_with(model, GRAPHS_ALONE, monkeypatch, setting=True)
    for tokens, loss in zip((12, 17, 30), expected, strict=True):
        found = loss_of(model, tokens)
        found.backward()
        assert found.item() == pytest.approx(loss, rel=1e-6)
    assert counters["stats"]["unique_graphs"] == graphs
    breaks = {re.findall(r"<function (\w+) at", reason)[0] for reason in counters["graph_break"]}
    assert breaks == {"document_attention"}


def no_backend(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no such kernel")


def no_backward(graph: Any, inputs: Any, **_: Any) -> Callable[..., Any]:
    """Refuse the second graph of a pair, as a backward that cannot be compiled."""
    from torch._dynamo.backends.common import aot_autograd

    made = aot_autograd(fw_compiler=lambda forward, _: forward, bw_compiler=lambda *_: no_backend())
    return made(graph, inputs)


@pytest.mark.parametrize("backend", [no_backend, no_backward])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_layers_that_cannot_be_compiled_run_eager_and_it_is_said_once(
    backend, checkpointing, monkeypatch, caplog
):
    model = small("llama-3-8b")
    expected = loss_of(model)
    (gradient,) = torch.autograd.grad(expected, model.model.embed_tokens.weight)
    checkpoint(model, checkpointing)
    compile_with(model, backend, monkeypatch, "cuda", checkpointing=checkpointing)
    for _ in range(2):
        found = loss_of(model)
        assert found.item() == expected.item()
        with documents.of(documents.row_of([5, 12])):
            (mine,) = torch.autograd.grad(found, model.model.embed_tokens.weight)
        assert torch.equal(mine, gradient)
    first, second = said(caplog)
    assert first == "Compile: layers, each at its first use"
    assert "LlamaDecoderLayer" in second and "no such kernel" in second


def test_with_true_a_layer_that_cannot_be_compiled_is_refused(monkeypatch):
    model = small("llama-3-8b")
    compile_with(model, no_backend, monkeypatch, setting=True)
    with pytest.raises(RunFailed, match=r"model\.compile=true: LlamaDecoderLayer cannot .* - "):
        loss_of(model)


@pytest.mark.parametrize(
    ("setting", "device", "able", "words"),
    [
        ("auto", "cpu", [True, True], ""),
        (False, "cuda", [True, True], ""),
        ("auto", "cuda", [True, True], "Compile: layers, each at its first use"),
        ("auto", "cuda", [True, False], "Compile: layers run eager, since rank 1 cannot compile"),
        ("auto", "cuda", [False, True], ""),  # `can_compile` has said why
    ],
)
def test_auto_compiles_on_gpus_where_every_rank_can(
    setting, device, able, words, monkeypatch, caplog
):
    monkeypatch.setattr(compiling, "can_compile", lambda _: able[0])
    model = small("llama-3-8b")
    world: Any = SimpleNamespace(
        device=torch.device(device), layout=Layout(2), all_gather_json=lambda _: able
    )
    compile_layers(decoder_layers(model), setting, world)
    assert [line.startswith(words) for line in said(caplog)] == [True] * bool(words)
    is_compiled = "forward" in vars(model.model.layers[0])
    assert is_compiled == (setting == "auto" and device == "cuda" and all(able))


def checkpoint(model: Any, mode: str) -> None:
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        kept = kept_operators(model)
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)
    model.gradient_checkpointing_enable(options)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    number = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func._schema.name in ("aten::mm", "aten::addmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.full
def test_compiled_dense_layers_keep_what_selective_checkpointing_keeps(monkeypatch):
    """So products are not computed again: two are in the backward for each in the forward."""
    tokens, model = 40, small("llama-3-8b")
    checkpoint(model, "selective")
    compile_with(model, PARTITIONED, monkeypatch, setting=True, checkpointing="selective")
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.numel() >= tokens:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    layer, ids = model.model.layers[0], torch.arange(tokens)[None]
    layer._gradient_checkpointing_func = None  # it would not see the products of a kernel
    row = documents.of(documents.row_of([tokens]))
    hidden = model.model.embed_tokens(ids).detach().requires_grad_()
    rotary = model.model.rotary_emb(hidden, ids)
    known = {x.untyped_storage().data_ptr() for x in rotary}
    parameters |= known
    saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with row, saved, Products() as forward:
        output = layer(hidden, position_embeddings=rotary, position_ids=ids)
    with Products() as backward:
        output.sum().backward()
    assert (forward.number, backward.number) == (7, 14)
    # Input, products (the gates and the up projections are twice as wide, keys and values half) and
    # attention: its output, that once more on a CPU, and the logarithm of each sum.
    of_token = WIDTH * (1 + (1 + 0.5 + 0.5 + 1) + (2 + 2 + 1) + 1 + 1) + 4
    assert sum(kept.values()) <= 1.01 * 4 * tokens * of_token


def test_compiled_layers_with_experts_are_checkpointed_as_eager_ones(monkeypatch):
    """Their experts run outside the graphs, and would keep all that they compute."""
    model = small("glm-4.5-air")
    checkpoint(model, "selective")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # it decides nothing here
    compile_with(model, None, monkeypatch, setting=True, checkpointing="selective")
    checkpointed: list[int] = []
    for number, layer in enumerate(model.model.layers):

        def tell(function: Any, *rest: Any, number: int = number) -> Any:
            checkpointed.append(number)
            return function(*rest)

        layer._gradient_checkpointing_func = tell
    loss_of(model)
    assert checkpointed == [1, 2]  # the first is dense


def require_workers(number: int) -> None:
    compiling.compile_for_all_lengths(torch.sin)
    assert get_compile_threads() == number


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_the_ranks_of_a_node_have_together_a_compile_worker_for_each_core(ranks, tmp_path):
    cores = len(os.sched_getaffinity(0))
    finish(on_ranks(ranks, require_workers, max(1, min(32, cores // ranks)), cwd=tmp_path))


CPU = torch.device("cpu")


def square(x: torch.Tensor) -> None:
    x.mul_(x).add_(3)


def test_all_that_is_compiled_adds_up_in_one_order(monkeypatch):
    """Else a GPU takes the fastest of some kernels, of which each has an order of its own."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda _, **options: given.update(options))
    compile_for_all_lengths(square)
    assert given == {"dynamic": True, "options": {"deterministic": True}}


def test_without_a_compiler_functions_run_eager_and_it_is_said_once(caplog):
    x = torch.full((5,), 2.0)
    with inductor.patch({"cpp.cxx": ("/nowhere/c++",), "force_disable_caches": True}):
        for name in ("the square", "the other"):
            compiled_or_eager(square, name, CPU)(x)
    assert x.eq(52).all()
    (line,) = said(caplog)
    assert line.startswith("Compile: nothing is compiled for this CPU (")


@pytest.mark.full
def test_a_function_that_cannot_be_compiled_runs_eager_and_is_named_once(caplog):
    def with_a_break(x: torch.Tensor) -> None:
        x.add_(1)
        torch._dynamo.graph_break()

    x, call = torch.zeros(5), compiled_or_eager(with_a_break, "the break", CPU)
    call(x)
    call(x)
    assert x.eq(2).all(), "what fails to compile has changed nothing"
    (line,) = said(caplog)
    assert line.startswith("Compile: the break runs eager (")


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_gradients_are_those_without_checkpointing(family, experts):
    torch.manual_seed(0)
    model = build(family).train()
    model.set_experts_implementation(experts)
    require_same_gradients(model)
    assert torch.ops.aten.mm.default in kept_operators(model)
    is_kept = torch.ops.aten._grouped_mm.default in kept_operators(model)
    assert is_kept == (family == "mixtral")


def test_products_that_a_layer_adds_to_are_not_kept():
    """PyTorch does not notice where Gemma 3n does so."""
    torch.manual_seed(0)
    require_same_gradients(AutoModelForCausalLM.from_config(tiny_config("gemma3n_text")).train())


def require_same_gradients(model: PreTrainedModel) -> None:
    ids = torch.randint(100, (1, 40))
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        contexts = partial(create_selective_checkpoint_contexts, kept_operators(model))
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
