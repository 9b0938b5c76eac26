"""Boxes of stored tensors against plain slicing, and stacks of experts against torch.stack."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from helpers.quantised_models import require_boxes
from helpers.tiny_models import cut_into_files
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Concatenate, MergeModulelist

from shardtune.errors import UserError
from shardtune.model.source import load_weights
from shardtune.model.source.weight_files import files_of_weights, list_tensors, weight_problems


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


def test_the_time_of_a_load_is_said_after_its_first_seconds(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(load_weights, "_FIRST_REPORT_S", 0)
    monkeypatch.setattr(load_weights, "_REPORT_EVERY_S", 0)
    monkeypatch.setattr(load_weights.logger, "propagate", True)
    save_file({"a": torch.ones(8)}, tmp_path / "a.safetensors")
    path = tmp_path / "a.safetensors"
    with (
        caplog.at_level(logging.INFO),
        load_weights.open_tensors([path], torch.float32, 0.5) as stored,
    ):
        for first in (0, 2):
            stored["a"][(slice(first, first + 2),)]
    first, second, last = caplog.messages
    assert first.startswith("Reading weights: about 0 s for 0.0 GB, at ")
    assert second.endswith("| about 0 s left")
    assert last.startswith("Read weights: 0.0 GB in 0 s, ")


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
