"""The files of a checkpoint, read without the program that wrote them, and which are kept."""

import json
import multiprocessing
import os
import platform
import re
import signal
import struct
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
import transformers
import xxhash
from helpers.built import build_model
from helpers.commands import finish
from helpers.ranks import config_for, on_ranks, run_script, train, train_on_nodes
from helpers.small_runs import (
    CONSTANT,
    SETTINGS,
    checkpoint,
    digests,
    names,
    tensors_of,
    write_inputs,
)
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

from shardtune.checkpoint import Saver, durable_fs
from shardtune.checkpoint import run_dir as run_dir_module
from shardtune.checkpoint.run_dir import open_run_dir
from shardtune.distributed.exit_code import run
from shardtune.distributed.join import join_world
from shardtune.model.source.files import read_model_config
from shardtune.run_files import VERSION
from shardtune.training.optim import build_optimizer
from shardtune.training.states.replica_shards import OwnedParameters

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def run_script_without_pickle(arguments: list[str]) -> None:
    """Refuse torch's own ways of sending and storing objects, which are pickles."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle")

    torch.save = torch.load = refuse
    torch.distributed.distributed_c10d._object_to_tensor = refuse
    run_script(arguments)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> dict[str, Path]:
    """Folders of runs of three steps on two nodes, with two ranks and one, that share a disk."""
    folders = {
        name: write_inputs(tmp_path_factory.mktemp("saved") / name, models[name])
        for name in ("glm", "llama")
    }
    given, work = (*SETTINGS, *CONSTANT, "train.max_steps=3"), run_script_without_pickle
    for folder in folders.values():
        finish(train_on_nodes([(folder, 2), (folder, 1)], *given, work=work))
    return folders


def manifest_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "manifest.json").read_text(encoding="utf-8"))


def whole_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every sharded tensor of a checkpoint, put together by torch."""
    described = manifest_of(directory)["tensors"]
    tensors = {
        name: torch.full(entry["shape"], torch.nan, dtype=getattr(torch, entry["dtype"]))
        for name, entry in described.items()
        if not name.startswith("random.")
    }
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    return tensors


@pytest.mark.parametrize("name", ["glm", "llama"])
def test_torch_reads_the_rank_files_by_itself(name, tmp_path, saved, models):
    """Weights equal the exported model's; with the moments, those of the same steps on one rank."""
    tensors = whole_tensors(checkpoint(saved[name] / "run", 3))
    exported = AutoModelForCausalLM.from_pretrained(saved[name] / "run/model", dtype="auto")
    expected = {f"model.{key}": tensor for key, tensor in exported.state_dict().items()}
    if name == "llama":
        del expected["model.lm_head.weight"]
    weights = {key: tensor for key, tensor in tensors.items() if key.startswith("model.")}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)

    alone = ("train.max_steps=3", "train.gradient_accumulation_steps=3", "export.final=false")
    write_inputs(tmp_path, models[name])
    finish(train(1, *SETTINGS, *CONSTANT, *alone, cwd=tmp_path))
    reference = tensors_of(checkpoint(tmp_path / "run", 3))
    assert tensors.keys() == {key for key in reference if not key.startswith("random.")}
    for key, tensor in tensors.items():
        torch.testing.assert_close(tensor, reference[key], rtol=1e-3, atol=1e-5, msg=key)
    moments = [tensors[key] for key in tensors if key.startswith("optimizer.exp_avg.")]
    parameters = sum(1 for _ in exported.parameters())
    assert len(moments) == parameters and all(tensor.abs().max() > 1e-5 for tensor in moments)
    assert all(tensor == 3 for key, tensor in tensors.items() if key.startswith("optimizer.step."))


GENERATORS = ("torch", "python", "numpy")


def parsed(file: Path) -> tuple[dict[str, Any], int, bytes]:
    """The header of a safetensors file, where its tensors begin, and all of its bytes."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), 8 + length, content


@pytest.mark.parametrize("name", ["glm", "llama"])
def test_the_manifest_says_what_the_files_hold(name, saved):
    directory = checkpoint(saved[name] / "run", 3)
    manifest, present = manifest_of(directory), digests(directory)
    complete = (directory / "COMPLETE").read_text(encoding="utf-8")
    assert complete == present.pop("manifest.json") + "\n" and present.pop("COMPLETE")
    assert present == {file: entry["xxh3_128"] for file, entry in manifest["files"].items()}
    for file, entry in manifest["files"].items():
        assert entry["bytes"] == (directory / file).stat().st_size

    files = {file: parsed(directory / file) for file in present if file.startswith("rank_")}
    ranges: dict[str, list[tuple[int, int]]] = {file: [] for file in files}
    for tensor, entry in manifest["tensors"].items():
        times_written = np.zeros(entry["shape"], np.int64)
        for chunk in entry["chunks"]:
            header, start, content = files[chunk["file"]]
            described = header[tensor]
            begin, end = (start + offset for offset in described["data_offsets"])
            assert (chunk["begin"], chunk["end"]) == (begin, end)
            assert chunk["xxh3_128"] == xxhash.xxh3_128(content[begin:end]).hexdigest()
            assert chunk["sizes"] == described["shape"]
            assert (
                getattr(torch, entry["dtype"]).itemsize * np.prod(chunk["sizes"], dtype=int)
                == end - begin
            )
            sharding = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
            assert sharding[tensor]["saved_offsets"] == chunk["offsets"]
            box = (slice(o, o + n) for o, n in zip(chunk["offsets"], chunk["sizes"], strict=True))
            times_written[tuple(box)] += 1
            ranges[chunk["file"]].append((begin, end))
        assert (times_written == 1).all(), tensor
    for file, (header, start, content) in files.items():  # nothing but tensors, end to end
        assert len(ranges[file]) == len(header) - 1
        edges = sorted(ranges[file])
        assert [begin for begin, _ in edges] == [start, *(end for _, end in edges[:-1])]
        assert edges[-1][1] == len(content)


def test_the_manifest_says_who_wrote_it_and_what_it_needs(saved):
    manifest = manifest_of(checkpoint(saved["glm"] / "run", 3))
    assert manifest["world"] == {"size": 3, "mesh": {"shard": 3}, "nodes": [0, 0, 1]}
    for rank, node in enumerate(manifest["world"]["nodes"]):
        assert manifest["files"][f"rank_0000{rank}.safetensors"]["node"] == node
    assert {entry["host"] for entry in manifest["files"].values()} == {platform.node()}
    assert manifest["versions"] == {
        "python": platform.python_version(),
        "shardtune": VERSION,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }
    state = manifest["state"]
    assert state["config"]["model"]["path"] == "model"
    sorted_json = json.dumps(state["config"], sort_keys=True).encode()
    assert manifest["config_xxh3_128"] == xxhash.xxh3_128(sorted_json).hexdigest()
    assert (state["step"], state["epoch"], state["row"]) == (3, 0, 9)
    assert manifest["tied_weights"] == {}
    tied = manifest_of(checkpoint(saved["llama"] / "run", 3))
    assert tied["tied_weights"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "model.lm_head.weight" not in tied["tensors"]
    generators = {f"random.{name}.0000{rank}" for name in GENERATORS for rank in range(3)}
    assert generators <= manifest["tensors"].keys()


def test_a_checkpoint_stores_nothing_but_tensors_and_text(saved):
    directory = checkpoint(saved["glm"] / "run", 3)
    ranks = [f"rank_0000{rank}.safetensors" for rank in range(3)]
    assert names(directory) == ["COMPLETE", "huggingface", "manifest.json", *ranks]
    for name in digests(directory).keys() - {"COMPLETE", *ranks}:
        text = (directory / name).read_text(encoding="utf-8")
        assert name.endswith(".jinja") or json.loads(text) is not None
    assets = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert assets <= {*names(directory / "huggingface")}


def save_while_weights_change(folder: str) -> None:
    """Change every weight and start a save while the previous one is written."""
    config = config_for(
        Path(folder) / "model", Path(folder), "model.compute_dtype=float32", "run.dir=run"
    )
    write_file, may_write = durable_fs.write_file, threading.Semaphore(0)

    def write_late(path: Path, parts: Any) -> Any:
        assert not path.name.startswith("rank_") or may_write.acquire(timeout=240)
        return write_file(path, parts)

    def work() -> None:
        durable_fs.write_file = write_late
        world = join_world(config)
        model = build_model(config, read_model_config(config.model), world)
        optimizer = build_optimizer(OwnedParameters(model, world), config)
        saver = Saver(
            open_run_dir(Path("run"), world), config.checkpoint, 60, model, optimizer, {}, world
        )
        for step in (1, 2, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step)
            if step > 1:
                threading.Timer(0.2, may_write.release).start()
            saver.save({"step": step, "config": {}})
            assert len(list(Path("run/checkpoints").glob("checkpoint_*/COMPLETE"))) == step - 1
        may_write.release()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(4)
        saver.finish()

    run(work)


def test_a_save_holds_what_was_there_when_it_began(tmp_path, models):
    write_inputs(tmp_path, models["qwen3"])
    finish(on_ranks(2, save_while_weights_change, str(tmp_path), cwd=tmp_path))
    for step in (2, 3):  # the first is gone
        for key, tensor in whole_tensors(checkpoint(tmp_path / "run", step)).items():
            assert not key.startswith("model.") or (tensor == step).all(), key


STRANGERS = (("checkpoint_9999999", "COMPLETE"), ("checkpoint_0000003", "notes.txt"))


def watch_retention(
    arguments: list[str], failing_step: int = 0, dies_when_deleting: int = 0
) -> None:
    """Note the whole checkpoints after each rename; fail one save, and die in one deletion.

    The first rename also creates the directories of STRANGERS.
    """
    rename, delete, write_file = durable_fs.rename, durable_fs.delete, durable_fs.write_file

    def noted(old: Path, new: Path) -> None:
        rename(old, new)
        for stranger, file in () if list(new.parent.glob(f"{STRANGERS[0][0]}*")) else STRANGERS:
            (new.parent / stranger).mkdir()
            (new.parent / stranger / file).touch()
        whole = sorted(
            int(path.parent.name[-7:]) for path in new.parent.glob("checkpoint_000*[0-9]/COMPLETE")
        )
        with Path("seen.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(whole)}\n")

    def die(path: Path) -> None:
        if path.name == f".checkpoint_{dies_when_deleting:07d}.deleting":
            os.kill(os.getpid(), signal.SIGKILL)
        delete(path)

    def fail(path: Path, parts: Any) -> Any:
        if f"checkpoint_{failing_step:07d}" in str(path):
            raise OSError(28, "No space left on device")
        return write_file(path, parts)

    durable_fs.rename, durable_fs.delete, durable_fs.write_file = noted, die, fail
    run_script(arguments)


@pytest.mark.parametrize("keep", [1, 2])
def test_as_many_checkpoints_are_kept_as_were_asked_for(keep, tmp_path, models):
    """Never fewer, although a save fails and the run is killed while it deletes.

    Entries of others are neither counted nor deleted.
    """
    write_inputs(tmp_path, models["llama"])
    given = [*SETTINGS, *CONSTANT, "train.max_steps=7", "export.final=false"]
    given += ["checkpoint.every_steps=1", f"checkpoint.keep={keep}"]
    dying = partial(watch_retention, failing_step=3, dies_when_deleting=2)
    killed = train(1, *given, cwd=tmp_path, work=dying)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    checkpoints = tmp_path / "run/checkpoints"
    assert ".checkpoint_0000002.deleting" in names(checkpoints)
    finish(train(1, *given, cwd=tmp_path, work=watch_retention))

    lines = (tmp_path / "seen.jsonl").read_text(encoding="utf-8").splitlines()
    seen = [json.loads(line) for line in lines]
    committed: set[int] = set()
    for whole in seen:
        committed |= set(whole)
        assert set(sorted(committed)[-keep:]) <= set(whole) and len(whole) <= keep + 1
    assert committed == {1, 2, 4, 5, 6, 7}
    of_strangers = ["checkpoint_0000003", "checkpoint_9999999.aside1"]
    kept = [f"checkpoint_{step:07d}" for step in sorted(committed)[-keep:]]
    assert names(checkpoints) == sorted(kept + of_strangers)
    assert [names(checkpoints / name) for name in of_strangers] == [["notes.txt"], ["COMPLETE"]]


def run_impatiently(arguments: list[str]) -> None:
    run_dir_module._LOCK_WAIT_S = 0.3
    run_script(arguments)


def test_a_second_job_in_the_same_folder_is_refused(tmp_path, models):
    first, second = (write_inputs(tmp_path / name, models["llama"]) for name in ("first", "second"))
    given = [*SETTINGS, *CONSTANT[:2], "export.final=false", "checkpoint.every_steps=5"]
    ended = []
    endless = [*given, "train.epochs=100000"]
    running = threading.Thread(target=lambda: ended.append(train(2, *endless, cwd=first)))
    running.start()
    while not list(first.glob("run/checkpoints/checkpoint_*")):
        time.sleep(0.02)
        assert running.is_alive()
    refused = train(2, *given, "run.dir=../first/run", cwd=second, work=run_impatiently)
    assert refused.returncode == 2
    assert "ERROR: run.dir=../first/run is in use by another run (" in refused.stderr
    assert running.is_alive()

    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    running.join()
    assert ended[0].returncode == -signal.SIGKILL
    last = max(int(path.name[-7:]) for path in first.glob("run/checkpoints/checkpoint_*"))
    more = f"train.max_steps={last + 6}"
    said = finish(train(2, *endless, more, cwd=first, work=run_impatiently))
    resumed = re.search(r"Resumed from checkpoint_(\d+)", said)
    # The save at the time of the kill may have been prepared.
    assert resumed and int(resumed[1]) in (last, last + 5), said


def test_moving_a_checkpoint_aside_loses_no_file(tmp_path, models):
    write_inputs(tmp_path, models["llama"])
    given = [*SETTINGS, *CONSTANT, "checkpoint.keep=9", "export.final=false"]
    finish(train(1, *given, "checkpoint.every_steps=1", "train.max_steps=3", cwd=tmp_path))
    checkpoints = tmp_path / "run/checkpoints"
    (checkpoints / "checkpoint_0000003/COMPLETE").unlink()
    for taken in ("checkpoint_0000003.aside1", "checkpoint_0000009"):
        (checkpoints / taken).mkdir()
        (checkpoints / taken / "notes.txt").write_text(f"of the user, in {taken}", encoding="utf-8")
    before = digests(checkpoints)
    links = {"latest": "checkpoint_0000012", "checkpoint_0000009.aside1": "nowhere"}
    for link, there in links.items():
        (checkpoints / link).symlink_to(there)
    said = finish(train(1, *given, "train.max_steps=4", cwd=tmp_path))
    assert "Resumed from checkpoint_0000002\n" in said
    assert "Not accepted: run/checkpoints/checkpoint_0000003/COMPLETE: " in said
    for moved in ("checkpoint_0000003", "checkpoint_0000009"):
        assert f"Moved aside, not part of this run: run/checkpoints/{moved}.aside2\n" in said
        before = {
            name.replace(f"{moved}/", f"{moved}.aside2/"): digest for name, digest in before.items()
        }
    after = digests(checkpoints)
    assert before.items() <= after.items()
    assert {name.split("/")[0] for name in after.keys() - before.keys()} == {"checkpoint_0000004"}
    for link, there in links.items():
        assert (checkpoints / link).readlink() == Path(there)
