"""The cache of tokenized data."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.data_run import TEMPLATE, Run, chat, problems_of, save_model, write
from helpers.small_runs import flip_bit
from transformers import GenerationConfig

from shardtune.config import DataConfig, TrainSource
from shardtune.data import dataset as dataset_module
from shardtune.data.dataset import open_prepared
from shardtune.log import node_logger

pytestmark = pytest.mark.usefixtures("cache")


def test_stop_tokens_and_the_code_of_data_are_parts_of_the_key(model, tmp_path, monkeypatch):
    train = write(tmp_path / "a.jsonl", [chat("how are you")])
    first = Run(model, train)
    stops = [first.encoder.tokenizer.eos_token_id, 5]
    other = save_model(tmp_path / "stops")
    GenerationConfig(eos_token_id=stops).save_pretrained(other)
    code = shutil.copytree(Path(dataset_module.__file__).parent, tmp_path / "code")
    entries = [first.entry, Run(other, train).entry]
    monkeypatch.setattr(dataset_module, "__file__", str(code / "dataset.py"))
    assert Run(model, train).entry == first.entry
    with (code / "forms/messages.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    entries.append(Run(model, train).entry)
    assert len(set(entries)) == 3


def test_a_second_start_is_cached_until_something_that_matters_changes(model, tmp_path):
    train = write(tmp_path / "a.jsonl", [chat("how are you"), chat("hello", "world")])
    text = train.read_text(encoding="utf-8") + "\n" * (1 << 20)  # a longer one will begin so
    train.write_text(text, encoding="utf-8")
    first = Run(model, train)
    assert first.lines[-1].startswith("Data: tokenized in ")
    train = train.rename(tmp_path / "renamed.jsonl")
    again = Run(model, train, date="2027-01-31", packing=False)
    assert again.lines == [f"Data: cached in {first.entry}"]
    assert again.prepared.key == first.prepared.key
    assert Run(save_model(tmp_path / "copy"), train).entry == first.entry
    dated = save_model(tmp_path / "dated", "{{ strftime_now('%d') }}" + TEMPLATE)
    changed = [
        Run(save_model(tmp_path / "other", "Hello." + TEMPLATE), train),
        Run(dated, train),
        Run(dated, train, date="2026-02-01"),
    ]
    train.write_text(f"{text}{json.dumps(chat('hello', 'World'))}\n", encoding="utf-8")
    changed.append(Run(model, train))
    assert len({run.entry for run in [first, *changed]}) == 5
    assert first.prepared.key not in {run.prepared.key for run in changed}


def test_each_key_makes_an_entry_of_its_own_but_those_of_rows_and_passes(model, tmp_path):
    """A key that the configuration gets needs another value here."""
    train = write(tmp_path / "a.jsonl", [chat("how are you"), chat("hello", "world")])
    other = write(tmp_path / "b.jsonl", [chat("how are you")])
    template = tmp_path / "other.jinja"
    template.write_text("Hello." + TEMPLATE, encoding="utf-8")
    of_data: dict[str, Any] = {
        "train": str(other),
        "eval": str(train),
        "columns": {"text": None},
        "roles": {"user": "user"},
        "chat_template": str(template),
        "template_options": {"text": None},
        "eval_fraction": 0.8,
        "max_length": 4095,
        "overflow": "split",
        "loss_on": "all",
        "on_broken": "drop",
        "packing": False,
    }
    of_source: dict[str, Any] = {
        "weight": 2.0,
        "name": "other",
        "loss_on": "last",
        "max_records": 1,
        "template_options": {"text": False},
    }
    assert of_data.keys() == DataConfig.model_fields.keys()
    assert of_source.keys() == TrainSource.model_fields.keys() - {"path"}
    of_data["train"] = [{"path": str(other)}]
    alone = [{"path": str(train)}]
    entries = {
        key: Run(model, **{"train": alone, key: value}).entry for key, value in of_data.items()
    }
    for key, value in of_source.items():
        entries[f"train.{key}"] = Run(model, [{"path": str(train), key: value}]).entry
    first = Run(model, alone).entry
    same = {key for key, entry in entries.items() if entry == first}
    assert same == {"packing", "train.weight", "train.name"}
    assert len({*entries.values()}) == len(entries) - len(same) + 1


def test_versions_of_libraries_make_an_entry_of_their_own(model, tmp_path, monkeypatch):
    train = write(tmp_path / "a.jsonl", [chat("how are you"), chat("hello")])
    entries = [Run(model, train).entry]
    for name in ("transformers", "tokenizers", "jinja2"):
        metadata = tmp_path / name / f"{name}-99.0.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n", "utf-8")
        with monkeypatch.context() as path:
            path.syspath_prepend(tmp_path / name)
            entries.append(Run(model, train).entry)
    assert len(set(entries)) == 4
    assert Run(model, train).entry == entries[0]


@pytest.mark.parametrize("damage", [flip_bit, lambda file: os.truncate(file, 0), Path.unlink])
@pytest.mark.parametrize(
    "name", ["train.tokens", "train.starts", "train.source", "meta.json", "digests.xxh128"]
)
def test_a_damaged_entry_is_made_anew_and_said_once(
    name, damage, model, tmp_path, cache, monkeypatch
):
    monkeypatch.setattr(node_logger, "propagate", True)
    train = write(tmp_path / "a.jsonl", [chat("how are you"), chat("hello", "world")])
    first = Run(model, train)
    before = {file.name: file.read_bytes() for file in first.entry.iterdir()}
    damage(first.entry / name)
    again = Run(model, train)
    damaged, tokenized = again.lines
    assert damaged.startswith(f"{first.entry}: damaged (")
    assert f"({name})" in damaged or name == "digests.xxh128"
    assert tokenized.startswith("Data: tokenized in ")
    assert {file.name: file.read_bytes() for file in first.entry.iterdir()} == before
    assert again.prepared.key == first.prepared.key
    assert Run(model, train).lines == [f"Data: cached in {first.entry}"]
    assert list(cache.iterdir()) == [first.entry]


def test_a_foreign_file_in_an_entry_is_removed_and_a_directory_in_place_of_a_file_replaced(
    model, tmp_path
):
    train = write(tmp_path / "a.jsonl", [chat("how are you")])
    entry = Run(model, train).entry
    (entry / "copy of meta.json").write_text("{}", "utf-8")
    (entry / "train.tokens").unlink()
    (entry / "train.tokens").mkdir()
    assert "damaged (copy of meta.json, train.tokens)" in Run(model, train).lines[0]
    assert Run(model, train).lines == [f"Data: cached in {entry}"]


def test_a_run_keeps_the_data_that_it_maps_when_another_makes_the_entry_anew(model, tmp_path):
    train = write(tmp_path / "a.jsonl", [chat("how are you"), chat("hello", "world")])
    first = Run(model, train)
    texts = first.texts()
    shutil.copy(first.entry / "train.record", tmp_path)
    (first.entry / "train.record").unlink()
    (first.entry / ".nfs0001").touch()  # not the cache's
    Run(model, train)
    assert first.texts() == texts
    assert (first.entry / "train.record").read_bytes() == (tmp_path / "train.record").read_bytes()
    assert open_prepared(first.entry).key == first.prepared.key
    assert Run(model, train).lines == [f"Data: cached in {first.entry}"]


def test_an_unwritable_cache_is_refused(model, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SHARDTUNE_CACHE", str(tmp_path / "file"))
    (problem,) = problems_of(model, write(tmp_path / "a.jsonl", [chat("q")]))
    assert f"{tmp_path}/file/data: the data cache cannot be written (Not a directory) - " in problem
    assert "SHARDTUNE_CACHE" in problem


def test_a_refused_build_leaves_nothing(model, tmp_path, cache):
    problems_of(model, write(tmp_path / "a.jsonl", [chat("q"), "broken"]))
    assert list(cache.iterdir()) == []
