"""Layers that keep a state, windows and sinks: a flat row is its documents, each alone."""

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.packing_families import build, decided
from helpers.tiny_models import VOCABULARY
from torch import nn

from shardtune.model import documents
from shardtune.model.documents.one_by_one import (
    call_one_by_one,
    missing_kernels,
    recurrence_flops,
    restore,
    separate_documents,
    state_mixers,
)

LENGTHS = [5, 1, 23, 12, 40]


def summed_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:-1], ids[1:], reduction="sum")


def take_gradients(model: nn.Module) -> torch.Tensor:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat([gradient.flatten() for gradient in found])


@pytest.mark.parametrize(
    ("family", "by_layer"),
    [
        *(("qwen3_next", False), ("gpt_oss", False), ("gemma3_text", False)),
        *(("deepseek_v4", True), ("falcon", True)),
    ],
)
def test_a_flat_row_is_its_documents_each_alone(family, by_layer):
    """Logits and gradients, by transformers' own attention for each document."""
    model = build(family).train()
    model.config.use_cache = False
    source = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, VOCABULARY, (length,), generator=source) for length in LENGTHS]
    alone = [model(input_ids=each.view(1, -1)).logits[0] for each in ids]
    torch.stack([*map(summed_loss, alone, ids)]).sum().backward()
    expected = take_gradients(model)
    attention = decided(model)
    assert attention.is_flat and attention.by_document, attention.text
    assert attention.by_layer == by_layer, attention.text
    row = {
        "input_ids": torch.cat(ids).view(1, -1),
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS]).view(1, -1),
    }
    with documents.of(documents.row_of(LENGTHS)):
        packed = model(**row).logits[0].split(LENGTHS)
        torch.stack([*map(summed_loss, packed, ids)]).sum().backward()
    spread = torch.cat(alone).std()
    for found, logits in zip(packed, alone, strict=True):
        assert (found - logits).abs().max() < 1e-5 * spread
    assert (take_gradients(model) - expected).norm() < 1e-5 * expected.norm()


def test_the_mixer_alone_is_called_once_per_document():
    """The rest of the layer, experts among it, sees the whole row, as all ranks must agree."""
    model = build("qwen3_next")
    (mixer,) = state_mixers(model)
    assert type(mixer).__name__ == "Qwen3NextGatedDeltaNet"
    calls: dict[str, list[int]] = {"mixer": [], "experts": []}
    forward = mixer.forward
    mixer.forward = lambda hidden_states, **options: (
        calls["mixer"].append(hidden_states.shape[1]) or forward(hidden_states, **options)
    )
    (*_, experts) = (m for m in model.modules() if type(m).__name__.endswith("SparseMoeBlock"))
    experts.register_forward_pre_hook(lambda _, given: calls["experts"].append(given[0].shape[1]))
    call_one_by_one(mixer)  # as `separate_documents`, around the forward that is watched
    with documents.of(documents.row_of([3, 4])):
        model(input_ids=torch.arange(7).view(1, -1))
    assert calls == {"mixer": [3, 4], "experts": [7]}


def test_padded_rows_are_left_to_the_model():
    model = build("jamba")
    attention = decided(model, "data.packing=false", "model.attention=sdpa")
    assert not attention.is_flat
    assert not any("forward" in vars(mixer) for mixer in state_mixers(model))


def test_a_gated_delta_rule_is_handed_where_documents_begin():
    class Net(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **options: Any) -> dict[str, Any]:
            return options | {"cu_seqlens": options.pop("cu_seq_lens_q", None)}

    net, row = Net(), documents.row_of([3, 4])
    separate_documents([net], at_once=True)
    with documents.of(row):
        given = net(torch.zeros(1, 7, 2))
    assert given["cu_seqlens"] is row.boundaries
    assert given["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    assert given["seq_idx"].dtype == torch.int32


@pytest.mark.parametrize(
    ("family", "missing", "flops"),
    [
        ("qwen3_next", ["flash-linear-attention", "causal-conv1d"], 6 * 4 * 8 * 8),
        ("kimi_linear", ["flash-linear-attention", "causal-conv1d"], 6 * 4 * 8 * 8),
        ("jamba", ["mamba-ssm", "causal-conv1d"], 4 * 64 * 8),
        ("mamba2", ["mamba-ssm", "causal-conv1d"], 4 * 64 * 8),
        ("minimax", [], 4 * 4 * 8 * 8),
        ("lfm2", ["causal-conv1d"], 0),
    ],
)
def test_kernels_that_are_not_there_are_named_and_states_counted(
    family, missing, flops, tmp_path, monkeypatch
):
    mixers = state_mixers(build(family))
    assert missing_kernels(mixers) == missing
    monkeypatch.syspath_prepend(tmp_path)
    for package in ("causal_conv1d", "fla", "mamba_ssm"):
        (tmp_path / f"{package}.py").touch()
    importlib.invalidate_caches()
    assert missing_kernels(mixers) == []
    assert recurrence_flops(mixers[0]) == flops


class Layer(nn.Module):
    """Returns its tokens, and remembers what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[dict[str, Any]] = []

    def forward(
        self,
        hidden_states: torch.Tensor,
        alibi: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, list[int]]:
        options |= {"alibi": alibi, "attention_mask": attention_mask}
        self.given.append(options | {"lengths": documents.current().lengths})
        return hidden_states, documents.current().lengths


def called(*given: Any, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    layer = Layer()
    call_one_by_one(layer)
    with documents.of(documents.row_of([3, 4])):
        output = layer(*given, **options)
        assert documents.current().boundaries.tolist() == [0, 3, 7]
    return output, layer.given


def test_masks_and_alibi_are_those_of_a_row_that_begins_with_the_document():
    """Also where they are no longer relative: Falcon rounds its ALiBi to bfloat16."""
    hidden, alibi = torch.arange(21).view(1, 7, 3), torch.arange(14).view(2, 1, 7)
    mask = torch.arange(49).view(1, 1, 7, 7)
    (output, _), (first, second) = called(hidden, alibi, attention_mask=mask)
    assert torch.equal(output, hidden)
    assert torch.equal(first["alibi"], alibi[..., :3])
    assert torch.equal(second["alibi"], alibi[..., :4])
    assert torch.equal(first["attention_mask"], mask[..., :3, :3])
    assert torch.equal(second["attention_mask"], mask[..., :4, :4])


@pytest.mark.parametrize("width", [2, 7])
def test_tokens_are_cut_wherever_their_dimension_is(width):
    """A width may be the number of tokens as well."""
    cos, places = torch.rand(3, 1, 7, width), torch.arange(7).view(1, 7)
    table = torch.rand(5, width)
    options = {"rope": {"main": (cos, cos)}, "table": table}
    (output, _), (first, second) = called(torch.rand(1, 7, width), position_ids=places, **options)
    assert output.shape == (1, 7, width)
    assert torch.equal(first["rope"]["main"][1], cos[:, :, :3])
    assert torch.equal(second["rope"]["main"][0], cos[:, :, 3:])
    assert second["position_ids"].tolist() == [[3, 4, 5, 6]]
    assert first["table"] is table


def test_a_module_within_sees_the_one_document():
    (_, last), (first, second) = called(torch.rand(1, 7, 2))
    assert first["lengths"] == [3] and second["lengths"] == [4] and last == [4]


def test_a_part_of_a_row_is_refused():
    with pytest.raises(RuntimeError, match=r"tensor of \(1, 5, 2\) for documents of 7 tokens"):
        called(torch.rand(1, 5, 2))


def test_a_restored_module_takes_the_row():
    layer = Layer()
    call_one_by_one(layer)
    restore(layer)
    with documents.of(documents.row_of([3, 4])):
        layer(torch.rand(1, 7, 2))
    assert len(layer.given) == 1
