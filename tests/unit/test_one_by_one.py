"""A module that is called once per document gets what each document has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardtune.model import documents
from shardtune.model.documents.one_by_one import call_one_by_one, restore


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
