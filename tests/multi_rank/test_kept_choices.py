"""A router whose second forward breaks ties otherwise changes nothing of a run."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers.chats import chats
from helpers.commands import finish, read_metrics
from helpers.moe_families import build
from helpers.plain_training import on_uneven_chats, save_new_model
from helpers.ranks import each_in_turn, on_ranks
from helpers.small_runs import steps_of
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

RANKS, EXPERTS, EQUAL = 2, 12, 3  # of each kind of router's rows, of which two are chosen


@torch.library.custom_op("flips::bias", mutates_args=())
def flip(bias: torch.Tensor) -> torch.Tensor:
    """Prefer the second rank's experts where a layer is computed again, by less than any score."""
    is_again = torch._C._current_graph_task_id() != -1
    return bias + 1e-6 * is_again * (torch.arange(len(bias)) >= len(bias) // 2)


@flip.register_fake
def _(bias: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(bias)


class Flipping:
    """The attributes of a router, with another bias."""

    def __init__(self, router: Any) -> None:
        self.router, self.e_score_correction_bias = router, flip(router.e_score_correction_bias)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.router, name)


def train_with_flips(runs: Sequence[tuple[int, Sequence[str]]]) -> None:
    torch.compile = partial(torch.compile, backend="eager")  # kernels would take minutes
    route = Glm4MoeTopkRouter.forward
    Glm4MoeTopkRouter.forward = lambda self, hidden: route(Flipping(self), hidden)
    each_in_turn(runs)


def tie(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.copy_(parameter[: EXPERTS // EQUAL].repeat(EQUAL, 1) * 8)


@pytest.mark.parametrize("compiled", ["false", pytest.param("true", marks=pytest.mark.full)])
def test_ties_that_flip_where_layers_are_computed_again_change_nothing(
    compiled, tokenizer, tmp_path
):
    save_new_model(lambda: build("glm4_moe"), tokenizer, tmp_path / "model", tie)
    kinds = ["none", "full", "selective", "offload"][:: 2 if compiled == "true" else 1]
    given = [f"parallel.expert={RANKS}", f"model.compile={compiled}", "train.max_steps=2"]
    runs = []
    for kind in kinds:
        own = [*given, f"model.activation_checkpointing={kind}", "export.final=false"]
        own = on_uneven_chats(tmp_path / "model", tmp_path, *own, run=kind, records=chats(12))
        runs.append((RANKS, own))
    (tmp_path / "config.yaml").touch()
    finish(on_ranks(RANKS, train_with_flips, runs, cwd=tmp_path))
    counts = [[entry["layers"] for entry in read_metrics(tmp_path / k, "experts")] for k in kinds]
    assert all(each == counts[0] != [] for each in counts)
    for kind in kinds[1:]:
        assert steps_of(tmp_path / kind) == steps_of(tmp_path / "none")
