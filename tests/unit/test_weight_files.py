"""Stored weights: boxes, stacks, digests that know them in any files, and drawn ones."""

import json
import logging
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers import moe_families
from helpers.documented import require_error_line
from helpers.quantised_models import require_boxes
from helpers.tiny_models import cut_into_files
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Concatenate, MergeModulelist

from shardtune.checkpoint.manifest import Checkpoint
from shardtune.checkpoint.resume_rules import require_allowed_settings, require_same_weights
from shardtune.config import Config
from shardtune.config_io import load_config
from shardtune.errors import UserError
from shardtune.model.moe.token_exchange import count_tokens
from shardtune.model.source import load_weights, weight_files
from shardtune.model.source.masters import draw_weights
from shardtune.model.source.weight_files import (
    files_of_weights,
    list_tensors,
    tensors_digest,
    weight_problems,
    weights_digest,
)


@pytest.mark.parametrize("piece", [1, 7, 64, 8 << 20])
def test_a_box_of_a_tensor_is_what_slicing_gives(piece, tmp_path, monkeypatch):
    monkeypatch.setattr(load_weights, "_PIECE_BYTES", piece)
    tensors = {
        "matrices": torch.randn(3, 5, 4),
        "half": torch.randn(6, 3).to(torch.bfloat16),
        "scalar": torch.tensor(7),
        "none": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    with load_weights.open_tensors([tmp_path / "a.safetensors"], torch.float32) as stored:
        assert stored.keys() == tensors.keys()
        for name, tensor in tensors.items():
            require_boxes(stored[name], tensor)


def test_a_file_that_became_shorter_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(8)}, path)
    with load_weights.open_tensors([path], torch.float32) as stored:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 4)
        with pytest.raises(OSError, match=r"a\.safetensors: ends at byte"):
            stored["a"][...]


@pytest.mark.parametrize(
    ("gate", "up"),
    [
        ([(2, 4)] * 3, [(2, 4)] * 3),
        ([(2, 4)] * 2, [(2, 4)] * 2),
        ([(2, 4)] * 4, [(2, 4)] * 4),
        ([(2, 4)] * 3, [(2, 4)] * 2),
        ([(2, 4)] * 3, []),
        ([(2, 4)] * 3, [(1, 4)] * 3),
        ([(2, 4)] * 3, [(3, 4)] * 3),
        ([(2, 4)] * 3, [(2, 4), (1, 4), (2, 4)]),
        ([(2, 1)] * 3, [(2, 1)] * 3),
    ],
)
def test_stored_experts_are_stacked_where_they_fill_the_stack(gate, up):
    """A stack has three experts of [2 + 2, 4]."""
    parts = {"gate": list(map(torch.randn, gate)), "up": list(map(torch.randn, up))}
    converter = load_weights.SliceConverter(
        ["gate", "up"], "gate_up", [MergeModulelist(dim=0), Concatenate(dim=1)]
    )
    for name, tensors in parts.items():
        for tensor in tensors:
            converter.add_tensor("gate_up", name, name, lambda tensor=tensor: tensor)
            converter.add_tensor("gate_up", name, name, lambda: None)  # another rank's
    if gate == up == [(2, 4)] * 3:
        expected = torch.cat([torch.stack(tensors) for tensors in parts.values()], dim=1)
        assert torch.equal(converter._stack(torch.Size([3, 4, 4])), expected)
    else:
        with pytest.raises(UserError, match="do not fill a stack of"):
            converter._stack(torch.Size([3, 4, 4]))


@pytest.mark.parametrize("index_is_stale", [False, True])
def test_the_files_of_a_model_are_those_that_transformers_reads(index_is_stale, models, tmp_path):
    """An older export may have left an index."""
    folder = cut_into_files(models["qwen3"], tmp_path / "model")
    if index_is_stale:
        weights = load_file(models["qwen3"] / "model.safetensors")
        newer = {name: tensor + 1 for name, tensor in weights.items()}
        save_file(newer, folder / "model.safetensors", {"format": "pt"})
    read = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    listed = list_tensors(folder)
    assert listed.keys() == read.keys() and not weight_problems(folder)
    for name, (_, _, file) in listed.items():
        assert torch.equal(load_file(folder / file)[name], read[name]), name


def test_files_that_transformers_would_read_otherwise_are_refused_by_name(models, tmp_path):
    folder = cut_into_files(models["qwen3"], tmp_path / "model")
    first = folder / files_of_weights(folder)[0]
    first.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    (folder / "adapter_config.json").write_text("{}")
    adapter, pointer = weight_problems(folder)
    assert adapter.startswith(f"{folder}/adapter_config.json: ")
    assert pointer.startswith(f"{first}: a pointer of Git LFS")
    (folder / "config.json").write_text(json.dumps({"transformers_weights": "own.safetensors"}))
    with pytest.raises(UserError, match=r"transformers_weights=own\.safetensors"):
        files_of_weights(folder)


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


def drawn(seed: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = moe_families.build("llama")
    draw_weights(model, seed, torch.device("cpu"))
    return dict(model.named_parameters())


def test_each_module_is_drawn_from_the_seed_and_its_name():
    weights, again, other = drawn(1), drawn(1), drawn(2)
    names = [name for name in weights if name.endswith("q_proj.weight")]
    first, second = (weights[name] for name in names)
    assert not torch.equal(first, second)
    assert torch.equal(first, again[names[0]]) and not torch.equal(first, other[names[0]])


def test_choices_beyond_the_experts_are_counted_apart():
    counts = torch.zeros(4, dtype=torch.int64)
    count_tokens(counts, torch.tensor([[0, 2], [2, 5], [3, 3]]))
    assert counts.tolist() == [1, 0, 2, 3]
