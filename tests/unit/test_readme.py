"""`README.md` of an exported model."""

from __future__ import annotations

import json
import shutil

import pytest
from helpers.chats import write_jsonl
from huggingface_hub import ModelCard

from shardtune.checkpoint.assets import SOURCE, list_source
from shardtune.checkpoint.export.readme import readme

EVALUATIONS = [
    {"kind": "eval", "step": 0, "perplexity": 15.98126},
    {"kind": "eval", "step": 2, "perplexity": 12.5},
    {"kind": "eval", "step": 4, "perplexity": 9.1},
    {"kind": "eval", "step": 4, "perplexity": 8.1, "set": "code"},
]
RUN = {"model": {"path": "acme/base"}, "run": {"dir": "runs/mine"}, "lora": {"rank": 16}}
STATE = {
    "config": RUN,
    "command": "train_fsdp.py data.train=a|b",
    "sources": [["chats", 1001, 20000], ["code", 7, 70]],
}


def test_it_has_base_licence_data_perplexities_and_command(tmp_path):
    metrics = write_jsonl(tmp_path / "metrics.jsonl", EVALUATIONS)
    source = {"path": "acme/base", "license": {"license": "mit"}}
    card = ModelCard(readme(STATE, {SOURCE: json.dumps(source).encode()}, metrics, 4, "peft"))
    data = card.data
    assert (data.base_model, data.license, data.library_name) == ("acme/base", "mit", "peft")
    for part in ("# mine\n", "| mit |", "1,001 records", "70 trained tokens", "15.9813", "9.1000"):
        assert part in card.text
    assert "| train_fsdp.py data.train=a\\|b |" in card.text
    assert "12.5" not in card.text and "8.1" not in card.text


def test_what_is_not_known_is_left_out(tmp_path):
    """Of a checkpoint of an older version, whose run is elsewhere and whose source is a folder."""
    folder = {"model": {"path": "/secret/place/base"}, "run": {"dir": "/secret/runs/mine"}}
    metrics = tmp_path / "nothing"
    text = readme({"config": folder}, {}, metrics, 4, "transformers")
    assert ModelCard(text).data.to_dict() == {"library_name": "transformers", "tags": ["shardtune"]}
    assert "| Base model | base |" in text
    assert "secret" not in text and "perplexity" not in text


@pytest.mark.parametrize(
    ("file", "text", "known"),
    [
        (
            "README.md",
            "---\nlicense: other\nlicense_name: glm\nlanguage: en\n---\nText",
            {"license": "other", "license_name": "glm"},
        ),
        ("README.md", "---\nlicense: [\n---\nText", {}),
        ("README.md", "No front matter", {}),
        ("LICENSE.txt", "\n   Apache License\n  Version 2.0", {"LICENSE.txt": "Apache License"}),
    ],
)
def test_the_licence_is_that_of_the_sources_card_or_file(file, text, known, models, tmp_path):
    source = shutil.copytree(models["llama"], tmp_path / "source")
    (source / file).write_text(text, encoding="utf-8")
    listed = list_source(str(source))
    assert listed["license"] == known
    text = readme(STATE, {SOURCE: json.dumps(listed).encode()}, tmp_path, 4, "peft")
    licence = {key: value for key, value in known.items() if key.startswith("license")}
    assert ModelCard(text).data.to_dict().items() >= licence.items()
    assert f"| Its licence | {next(iter(known.values()), 'not named in its files')} |" in text
