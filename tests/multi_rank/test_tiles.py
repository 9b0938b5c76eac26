"""Experts and MLPs in tiles have plain PyTorch's gradients, however few a rank's tokens are."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.built import build_model
from helpers.commands import finish
from helpers.moe_families import build
from helpers.ranks import on_ranks
from torch.nn.functional import cross_entropy

from shardtune.config_io import load_config
from shardtune.data.batch import Batch
from shardtune.distributed.join import join_world
from shardtune.model import documents
from shardtune.model.loss import summed_loss, use_loss_head
from shardtune.model.parts import decoder_layers, stacked_experts
from shardtune.model.recomputation import tile_layers

TILES = 3
LENGTHS = [[31], [1], [2, 9], [4]]  # documents of the row of each rank
GIVEN = ["model.path=unread", "model.init=random", "model.compute_dtype=float32"]
GIVEN += ["data.train=unread", "model.activation_checkpointing=full"]


@pytest.mark.parametrize(
    ("ranks", "family", "assignments"),
    [
        (2, "glm4_moe", ["parallel.expert=2"]),
        pytest.param(4, "qwen3_moe", ["parallel.expert=4"], marks=pytest.mark.full),
        pytest.param(2, "gpt_oss", [], marks=pytest.mark.full),
        pytest.param(2, "llama", [], marks=pytest.mark.full),
    ],
)
def test_tiles_have_the_gradients_of_whole_rows(ranks, family, assignments, tmp_path):
    finish(on_ranks(ranks, _compare, family, assignments, cwd=tmp_path))


@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe"])
def test_stacked_experts_get_a_tile_of_the_tokens_at_a_time(family):
    model, tokens, ids = build(family), list[int](), torch.arange(1, 32)[None]
    expected = model(ids).logits
    for _, experts, _ in stacked_experts(model):

        def noted(rows: torch.Tensor, *given: Any, run: Any = experts.forward) -> Any:
            tokens.append(len(rows))
            return run(rows, *given)

        experts.forward = noted
    tile_layers(model, decoder_layers(model), TILES)
    torch.testing.assert_close(model(ids).logits, expected)
    assert {*tokens} == {11, 10}


def _compare(family: str, assignments: list[str]) -> None:
    config = load_config(Path("/dev/null"), [*GIVEN, *assignments], {})
    world = join_world(config)
    plain = build(family)
    model = build_model(config, plain.config, world)
    plain.load_state_dict({n: p.full_tensor() for n, p in model.named_parameters()}, strict=False)
    model.set_attn_implementation("documents")
    use_loss_head(model, world.device)
    tile_layers(model, decoder_layers(model), TILES)
    rows = [_row(lengths) for lengths in LENGTHS[: world.size]]
    with documents.of(rows[world.rank]):
        loss = summed_loss(model, rows[world.rank])
        loss.backward()
    total = torch.zeros(())
    for row in rows:
        for ids in row.input_ids[0].split(row.lengths):
            logits = plain(ids[None]).logits[0]
            total = total + cross_entropy(logits[:-1], ids[1:], reduction="sum")
    total.backward()
    reduced = loss.detach().clone()
    dist.all_reduce(reduced)
    torch.testing.assert_close(reduced, total.detach(), rtol=1e-6, atol=0)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        own = parameter.grad.full_tensor() * world.layout.stage_ranks
        torch.testing.assert_close(own, expected[name], rtol=1e-4, atol=2e-6, msg=name)


def _row(lengths: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(1, 99, (1, sum(lengths)), generator=generator)
    places = torch.cat([torch.arange(n) for n in lengths])
    trained = (places[1:] > 0).nonzero().flatten()
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return Batch(ids, places[None], None, trained, ids[0, trained + 1], lengths, boundaries)
