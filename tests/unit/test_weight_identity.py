"""Weights are known by their tensors, whatever files they lie in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers.documented import require_error_line
from helpers.tiny_models import cut_into_files
from safetensors.torch import save_file

from shardtune.checkpoint.manifest import Checkpoint
from shardtune.checkpoint.resume_rules import require_allowed_settings, require_same_weights
from shardtune.config import Config
from shardtune.config_io import load_config
from shardtune.errors import UserError
from shardtune.model.source import weight_files
from shardtune.model.source.weight_files import tensors_digest, weights_digest

REPOSITORY = Path(__file__).parents[2]

TENSORS = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(40), "c": torch.zeros(0)}


def digest_of(tensors: Mapping[str, torch.Tensor], folder: Path) -> str:
    save_file(dict(tensors), folder / "model.safetensors")
    return weights_digest(folder)


def test_weights_are_the_same_in_other_files_and_no_others_are(tmp_path):
    digest = digest_of(TENSORS, tmp_path)
    assert weights_digest(cut_into_files(tmp_path, tmp_path / "cut")) == digest
    other_value = TENSORS["b"].clone()
    other_value[1, 2] += 1
    for changed in (
        {"b": other_value},
        {"b": TENSORS["b"].view(3, 2)},
        {"b": TENSORS["b"].view(torch.int32)},
        {"d": torch.zeros(0)},
    ):
        assert digest_of(TENSORS | changed, tmp_path) != digest
    swapped = {"a": TENSORS["b"], "b": TENSORS["a"], "c": TENSORS["c"]}
    assert digest_of(swapped, tmp_path) != digest


def test_of_large_weights_samples_from_both_ends_of_each_tensor_count(tmp_path, monkeypatch):
    """Two tensors of 4,000 and 1,000 bytes: 20 and 5 blocks of 16 bytes, so 400 bytes of 5,000."""
    sizes = {"WHOLE_BYTES": 4999, "_SAMPLED_BYTES": 400, "_BLOCK_BYTES": 16}
    for name, value in sizes.items():
        monkeypatch.setattr(weight_files, name, value)
    file = tmp_path / "model.safetensors"
    first, second = torch.zeros(4000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    save_file({"first": first, "second": second}, file)
    content, digest = bytearray(file.read_bytes()), weights_digest(tmp_path)
    data = len(content) - 5000
    seen = []
    for at in range(0, 5000, 8):  # at least one in each block
        content[data + at] ^= 1
        file.write_bytes(content)
        content[data + at] ^= 1
        if weights_digest(tmp_path) != digest:
            seen.append(at)
    assert {0, 3992, 4000, 4992} <= set(seen) and 50 <= len(seen) <= 75
    assert max(b - a for a, b in pairwise(seen)) <= 250
    # Of the same bytes as a part of less, none is left out.
    assert tensors_digest([file], 4999) != digest


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02" + bytes(7) + b"[]", bytes(64)])
def test_a_damaged_file_of_weights_has_no_digest(content, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: no header of tensors"):
        tensors_digest([file])


def test_only_where_a_digest_of_the_weights_decides_may_they_lie_elsewhere():
    def configured(path: str) -> Config:
        return load_config(REPOSITORY / "examples/demo.yaml", [f"model.path={path}"], {})

    config, before = configured("there"), configured("here").model_dump(mode="json")

    def saved(**state: str) -> Checkpoint:
        return Checkpoint("checkpoint_0000002", {"state": {"config": before} | state}, "", [])

    require_allowed_settings(saved(weights="abc"), config)
    with pytest.raises(UserError, match=r"model\.path is .*there.* and was .*here"):
        require_allowed_settings(saved(), config)


def test_a_resume_on_other_frozen_weights_is_refused_and_an_old_checkpoint_names_none(caplog):
    def saved(**state: str) -> Checkpoint:
        return Checkpoint("checkpoint_0000002", {"state": state}, "", [])

    with caplog.at_level(logging.INFO):
        require_same_weights(saved(weights="abc"), "abc")
        assert not caplog.messages
        require_same_weights(saved(), "abc")
    (said,) = caplog.messages
    assert said.startswith("checkpoint_0000002 does not say which frozen weights")
    with pytest.raises(UserError) as refused:
        require_same_weights(saved(weights="abc"), "abd")
    (problem,) = refused.value.problems
    assert '"abd" and was "abc" in checkpoint_0000002' in problem
    require_error_line(f"ERROR: {problem}")
