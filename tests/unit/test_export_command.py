"""`export`: what it refuses, its README.md, and that its folder is whole or not there."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.chats import write_jsonl
from helpers.faults import DiskOs, Fault, fails
from helpers.small_runs import checkpoint, digests, flip_bit, names
from helpers.thread_ranks import save_steps
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardtune.__main__ import run
from shardtune.checkpoint import durable_fs, load, open_checkpoint
from shardtune.checkpoint.assets import SOURCE, list_source, model_assets, readme
from shardtune.checkpoint.load import read_chunk
from shardtune.checkpoint.manifest import DamagedCheckpoint, StoredChunk


def test_the_hubs_cache_of_links_is_read(tmp_path, models):
    blobs, snapshot = tmp_path / "model/blobs", tmp_path / "model/snapshots/abc"
    shutil.copytree(models["llama"], blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert model_assets(snapshot) == model_assets(models["llama"])
    (tmp_path / "link").symlink_to(snapshot)
    assert model_assets(tmp_path / "link") == model_assets(models["llama"])
    edited = (snapshot / "config.json").read_bytes()
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_bytes(edited)
    assert model_assets(snapshot) == model_assets(models["llama"])


EXPERTS = "model.model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """A checkpoint of two ranks."""
    run_dir = tmp_path_factory.mktemp("exported") / "run"
    model = AutoModelForCausalLM.from_pretrained(models["glm"], dtype=torch.float32)
    assets = model_assets(models["glm"])
    save_steps((2,), 2, [run_dir], keep=1, model=model, assets=assets)
    return checkpoint(run_dir, 2)


@pytest.fixture
def copied(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copied"))


Export = Callable[..., tuple[int, str]]


@pytest.fixture
def export(copied: Path, capsys: pytest.CaptureFixture[str]) -> Export:
    """Export the copy; the exit code and standard error."""

    def export_to(out: Path, *options: str) -> tuple[int, str]:
        capsys.readouterr()
        return run(["export", str(copied), str(out), *options]), capsys.readouterr().err

    return export_to


def chunk_of_experts(directory: Path) -> StoredChunk:
    return open_checkpoint(directory).chunks[EXPERTS][0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_export_has_the_dtype_that_is_asked_for(dtype, export, tmp_path):
    """The tensor that transformers keeps in float32 stays so."""
    assert export(tmp_path / "plain") == export(tmp_path / "other", "--dtype", dtype) == (0, "")
    expected = load_file(tmp_path / "plain/model.safetensors")
    for key, tensor in load_file(tmp_path / "other/model.safetensors").items():
        is_exact = key.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if is_exact else getattr(torch, dtype)), key
        assert torch.equal(tensor, expected[key].to(tensor.dtype)), key
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "other", dtype="auto")
    assert opened.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("file", ["rank", "huggingface/tokenizer.json"])
def test_a_damaged_checkpoint_is_not_exported(file, export, copied, tmp_path):
    chunk = chunk_of_experts(copied)
    damaged, position = (chunk.file, chunk.begin) if file == "rank" else (file, 100)
    flip_bit(copied / damaged, position)
    code, error = export(tmp_path / "out")
    tensor = f"tensor {EXPERTS} is damaged" if file == "rank" else "is damaged"
    remedy = "restore it from a copy, or use another checkpoint"
    assert code == 1 and error == f"ERROR: {copied / damaged}: {tensor} - {remedy}\n"
    assert names(tmp_path) == ["copied"]


@pytest.mark.parametrize("piece", [1, 5000, 16 << 20])
def test_a_box_of_a_chunk_is_read_in_pieces(piece, copied, monkeypatch):
    monkeypatch.setattr(load, "_PIECE_BYTES", piece)
    saved, chunk = open_checkpoint(copied), chunk_of_experts(copied)
    stored = load_file(copied / chunk.file)[chunk.tensor]
    assert torch.equal(read_chunk(saved, chunk), stored)
    for box in ([slice(1, 2), slice(3, 9), slice(0, 5)], [slice(0, 2), slice(0, 1), slice(4, 16)]):
        target = torch.zeros(8, 40, 50)[1:7:3, :, ::2]
        part = target[tuple(slice(0, edge.stop - edge.start) for edge in box)]
        read_chunk(saved, chunk, box, part)
        assert torch.equal(part, stored[tuple(box)])
    (scalar,) = saved.chunks[chunk.tensor.replace("model.", "optimizer.step.", 1)]
    assert read_chunk(saved, scalar) == load_file(copied / scalar.file)[scalar.tensor]


def test_a_chunk_that_was_damaged_since_its_check_is_an_error(copied):
    saved, chunk = open_checkpoint(copied), chunk_of_experts(copied)
    file = copied / chunk.file
    content = file.read_bytes()
    rows = read_chunk(saved, chunk, [slice(1, 2), *(slice(0, n) for n in chunk.sizes[1:])])
    assert torch.equal(rows, load_file(file)[chunk.tensor][1:2])

    flip_bit(file, chunk.end - 1)
    message = re.escape(f"{file}: tensor {chunk.tensor} is damaged")
    for length in (len(content), chunk.end - 1, chunk.begin, 0):
        os.truncate(file, length)
        with pytest.raises(DamagedCheckpoint, match=message):
            read_chunk(saved, chunk)
    file.unlink()
    file.symlink_to("/proc/self/mem")  # its first pages cannot be read: EIO
    with pytest.raises(OSError, match="Input/output error"):
        read_chunk(saved, chunk)


@pytest.mark.parametrize("out", ["file/out", "file/deep/out", "/proc/out", "x" * 300])
def test_a_folder_that_cannot_be_created_is_refused(out, export, tmp_path):
    (tmp_path / "file").touch()
    code, error = export(tmp_path / out)
    line = rf"ERROR: {tmp_path / out} cannot be created: .+ - name another .+\n"
    assert code == 2 and re.fullmatch(line, error)
    assert names(tmp_path) == ["copied", "file"]


def test_an_export_to_a_full_disk_leaves_nothing(export, tmp_path, monkeypatch):
    full = DiskOs(Fault("write", "*/model.safetensors", fails(errno.ENOSPC), nth=9))
    monkeypatch.setattr(durable_fs, "os", full)
    code, error = export(tmp_path / "out")
    line = rf"ERROR: {tmp_path}/out was not written: .*No space left .* - make room .+\n"
    assert code == 1 and re.fullmatch(line, error)
    assert names(tmp_path) == ["copied"]


def test_an_export_touches_no_existing_folder(export, tmp_path):
    assert export(tmp_path / "out") == (0, "")
    (tmp_path / "out/config.json").write_text("of the user", encoding="utf-8")
    before = digests(tmp_path / "out")
    refusal = f"ERROR: {tmp_path}/out exists - name a directory that does not\n"
    assert export(tmp_path / "out") == (2, refusal)
    assert digests(tmp_path / "out") == before


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
