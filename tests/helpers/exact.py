"""Whole runs against the plain loop: models with losses that differ, meshes, and one check."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from helpers import moe_families, packing_families
from helpers.commands import finish
from helpers.plain_training import (
    ROWS_PACKED,
    Trained,
    assert_same_steps,
    assert_same_weights,
    encode,
    on_uneven_chats,
    plain_training,
    save_new_model,
    sharpen,
    uneven_chats,
    with_weights,
)
from helpers.ranks import train

NONE, SELECTIVE, FULL = (
    f"model.activation_checkpointing={how}" for how in ("none", "selective", "full")
)
APART, TWO_ROWS, COMPILED = "data.packing=false", "train.micro_batch_size=2", "model.compile=true"
BFLOAT16, EIGHT_BITS = "model.master_dtype=bfloat16", "optimizer.name=adamw8bit"
RATE, STEPS = 3e-3, 4
MAX_NORM = 0.5  # of a run that is resumed

_THREE_KEY_HEADS = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3}
_FIVE_LAYERS = {"num_hidden_layers": 5, "intermediate_size": 64}
_SIX_STACKED = {"hidden_size": 36, "intermediate_size": 36, "num_local_experts": 6}
# Families of moe_families with other settings; all others are called as they are there.
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_of_3": ("llama", _THREE_KEY_HEADS),
    "llama_of_4": ("llama", {"num_key_value_heads": 4}),
    "tied_llama": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama_with_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "glm_with_norms": ("glm4_moe", {"use_qk_norm": True}),
    # Sinks. All experts take each token: rounding sends none to another one.
    "gpt_oss_of_2": ("gpt_oss", _THREE_KEY_HEADS | {"num_local_experts": 2}),
    # Files hold its six experts stacked; their width divides neither 5 nor 8.
    "gpt_oss_of_6": ("gpt_oss", _SIX_STACKED),
    "deep_tied": ("llama", _FIVE_LAYERS | {"tie_word_embeddings": True}),
    "deep_llama": ("llama", _FIVE_LAYERS | {"tie_word_embeddings": False}),
    "deep_qwen3": ("qwen3", _FIVE_LAYERS | {"tie_word_embeddings": False}),
    "deep_glm": ("glm4_moe", {"num_hidden_layers": 5, "n_routed_experts": 8}),
    "deep_deepseek": ("deepseek_v3", {"num_hidden_layers": 5, "n_group": 2}),
}
# Those of packing_families. Their weights are sharp enough, and sharper ones send tokens that round
# otherwise to other experts.
_WINDOWS = {"windows_gpt_oss": "gpt_oss", "gemma3_text": "gemma3_text"}


def build(family: str) -> Any:
    if family in _WINDOWS:
        return packing_families.build(_WINDOWS[family])
    kind, more = _VARIANTS.get(family, (family, {}))
    return moe_families.build(kind, **more)


class Sharp(dict[str, Path]):
    """Models, made when they are asked for first, with matrices eight times as large: losses differ
    from token to token, as after pretraining."""

    def __init__(
        self, models: dict[str, Path], tokenizer: PreTrainedTokenizerFast, root: Path
    ) -> None:
        super().__init__()
        self._models, self._tokenizer, self._root = models, tokenizer, root

    def __missing__(self, family: str) -> Path:
        folder = self._root / family
        if family in self._models:
            with_weights(self._models[family], folder, sharpen)
        else:
            change = (lambda model: None) if family in _WINDOWS else _sharpen_and_move_biases
            save_new_model(partial(build, family), self._tokenizer, folder, change)
        self[family] = folder
        return folder


def _sharpen_and_move_biases(model: Any) -> None:
    sharpen(model)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.1)


@pytest.fixture(scope="session")
def sharp(
    models: dict[str, Path],
    tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Sharp:
    return Sharp(models, tokenizer, tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="session")
def plain(sharp: Sharp, tokenizer: PreTrainedTokenizerFast) -> Callable[..., Trained]:
    """The plain loop over `uneven_chats`, once for each family and setting."""
    records = [encode(tokenizer, record) for record in uneven_chats()]

    @cache
    def trained(family: str, *given: Any) -> Trained:
        return plain_training(sharp[family], records, *given[:3], dtype=given[3])

    def of(
        family: str,
        rates: tuple[float, ...] = (RATE,) * STEPS,
        max_norm: float = math.inf,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> Trained:
        return trained(family, rates, max_norm, weight_decay, dtype)

    return of


class Mesh(NamedTuple):
    ranks: int = 1
    expert: int = 1
    replicate: int = 1
    stages: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.stages // self.context // self.tensor

    def assignments(self, *more: str) -> list[str]:
        """Those of the mesh, and of a step that takes all rows of `uneven_chats`."""
        rows = ROWS_PACKED * (1 + (APART in more)) // (1 + (TWO_ROWS in more))
        return [
            *(f"parallel.{key}={getattr(self, key)}" for key in self._fields[1:]),
            f"train.gradient_accumulation_steps={-(-rows // self.data_ranks)}",
            *more,
        ]


@pytest.fixture
def check_exact(
    sharp: Sharp, plain: Callable[..., Trained], tmp_path: Path
) -> Callable[..., list[str]]:
    return partial(_check_exact, sharp, plain, tmp_path)


def _check_exact(
    sharp: Sharp,
    plain: Callable[..., Trained],
    folder: Path,
    family: str,
    meshes: Sequence[Mesh],
    more: Sequence[str],
    rel: float = 1e-5,
    rate: float = RATE,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> list[str]:
    """Expect the steps and the weights of a plain loop, within `rel`; return what each run said.

    One optimizer step is an epoch, so that the plain loop need not know the order of the data.
    Where there are two meshes, gradients are clipped, and the second one resumes what the first has
    saved.
    """
    max_norm = MAX_NORM if len(meshes) > 1 else math.inf
    said = []
    for number, mesh in enumerate(meshes, 1):
        given = [f"train.epochs={STEPS}", f"train.max_steps={STEPS * number // len(meshes)}"]
        given += [f"optimizer.lr={rate}", f"export.final={str(number == len(meshes)).lower()}"]
        given += [f"train.max_grad_norm={max_norm}"] if max_norm < math.inf else []
        assignments = on_uneven_chats(sharp[family], folder, *given, *mesh.assignments(*more))
        said.append(finish(train(mesh.ranks, *assignments, cwd=folder, **how)))
        assert "Steps per epoch: 1 | " in said[-1]
        assert number == 1 or f"Resumed from checkpoint_000000{STEPS // 2}" in said[-1]
    expected = plain(family, (rate,) * STEPS, max_norm, dtype=dtype)
    assert max_norm == math.inf or family in _WINDOWS or max(expected.norms) > max_norm
    assert_same_steps(folder / "run", expected, rel)
    assert_same_weights(folder / "run", expected)
    return said
