"""Nodes that do not share run.dir: each has its own folder, and run.dir is a relative path."""

import errno
import os
import re
import shutil
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers.commands import finish
from helpers.faults import Fault, fails, run_with
from helpers.ranks import run_script, train, train_on_nodes
from helpers.small_runs import (
    CONSTANT,
    SETTINGS,
    assert_same_tensors,
    checkpoint,
    close_to,
    digests,
    flip_bit,
    names,
    steps_of,
    tensors_of,
    write_inputs,
)
from safetensors.torch import load_file

import shardtune.checkpoint
from shardtune.__main__ import run
from shardtune.checkpoint import Checkpoint, Saver, durable_fs

SAVES = (
    *(*SETTINGS, *CONSTANT),
    *("checkpoint.every_steps=2", "checkpoint.keep=9", "checkpoint.mirror=false"),
)
STAGING = ".checkpoint_0000004.0123456789ab0001"
SPOILT = "model.model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """The run directory of six steps of three ranks on one disk."""
    folder = write_inputs(tmp_path_factory.mktemp("whole"), models["glm"], dropout=0.2)
    assert train(3, *SAVES, "train.max_steps=6", cwd=folder).returncode == 0
    return folder / "run"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> Path:
    """Two nodes, `a` of two ranks and `b` of one, whose run has been going for four steps."""
    root = tmp_path_factory.mktemp("disks")
    nodes = [
        (write_inputs(root / name, models["glm"], dropout=0.2), ranks)
        for name, ranks in (("a", 2), ("b", 1))
    ]
    finish(train_on_nodes(nodes, *SAVES, "train.max_steps=4", "export.final=false"))
    return root


@pytest.fixture
def a(earlier: Path, tmp_path: Path) -> Path:
    shutil.copytree(earlier, tmp_path, dirs_exist_ok=True)
    return tmp_path / "a"


@pytest.fixture
def b(a: Path) -> Path:
    return a.with_name("b")


def last_files(*folders: Path) -> dict[str, str]:
    """The rank files of the last step, on whichever disk they lie."""
    return {
        name: digest
        for folder in folders
        for name, digest in digests(checkpoint(folder / "run", 6), "*.safetensors").items()
    }


def go_on(nodes: Sequence[tuple[Path, int]], *more: str, since: int = 4, last: int = 6) -> str:
    """Resume from the checkpoint of that step, and return what is said until the last one."""
    said = finish(train_on_nodes(nodes, *SAVES, f"train.max_steps={last}", *more))
    assert f"Resumed from checkpoint_{since:07d}\n" in said
    return said


def saved_steps(folder: Path) -> list[str]:
    """The names of what is neither hidden nor set aside."""
    listed = names(folder / "run/checkpoints")
    return [name for name in listed if name[0] != "." and "aside" not in name]


def checkpoints_of(*steps: int) -> list[str]:
    return [f"checkpoint_{step:07d}" for step in steps]


def test_a_run_on_two_disks_goes_on_as_on_one(a, b, whole):
    go_on([(a, 2), (b, 1)])
    assert steps_of(a / "run") == steps_of(whole)
    for step in (2, 4, 6):
        one, other = (digests(checkpoint(folder / "run", step)) for folder in (a, b))
        assert {name for name in one if name.startswith("rank_")} == {
            f"rank_0000{n}.safetensors" for n in (0, 1)
        }
        assert other.keys() - one.keys() == {"rank_00002.safetensors"}
        assert {name for name in one.keys() & other.keys() if one[name] == other[name]} >= {
            "manifest.json",
            "COMPLETE",
            "huggingface/config.json",
            "huggingface/tokenizer.json",
        }
    assert last_files(a, b) == digests(checkpoint(whole, 6), "*.safetensors")
    exported, expected = digests(a / "run/model"), digests(whole / "model")
    assert exported.pop("export.json") and expected.pop("export.json") and exported == expected
    assert names(b / "run") == [".lock", "checkpoints"] and len(names(a / "run")) == 6


@pytest.mark.parametrize(
    "layout",
    [
        [("b", 2), ("a", 1)],
        pytest.param([("a", 1), ("b", 2)], marks=pytest.mark.full),
    ],
)
def test_ranks_may_find_their_parts_on_another_disk(layout, a, b, whole):
    """After disks are swapped or ranks moved between nodes, the run is the same."""
    nodes = [({"a": a, "b": b}[name], ranks) for name, ranks in layout]
    said = go_on(nodes)
    is_swapped = nodes[0][0] == b
    assert steps_of(nodes[0][0] / "run") == steps_of(whole)[4 * is_swapped :]
    assert ("metrics.jsonl: the steps up to 4 are on node 1 (" in said) == is_swapped
    assert last_files(a, b) == digests(checkpoint(whole, 6), "*.safetensors")
    assert_same_tensors(nodes[0][0] / "run/model", whole / "model")


@pytest.mark.full
def test_a_run_resumes_on_another_number_of_ranks_and_of_disks(tmp_path, models):
    nodes = {
        name: write_inputs(tmp_path / name, models["glm"]) for name in ("a", "b", "c", "alone")
    }
    first = [(nodes["a"], 2), (nodes["b"], 1)]
    then = [(nodes["a"], 1), (nodes["c"], 1), (nodes["b"], 2)]
    rows = "train.gradient_accumulation_steps="
    finish(train_on_nodes(first, *SAVES, f"{rows}4", "train.max_steps=2"))
    go_on(then, f"{rows}3", since=2, last=4)
    finish(train(1, *SAVES, f"{rows}12", "train.max_steps=4", cwd=nodes["alone"]))
    run_dirs = nodes["a"] / "run", nodes["alone"] / "run"
    found, expected = (steps_of(run_dir)[-2:] for run_dir in run_dirs)
    assert found == close_to(expected)
    model, expected = (tensors_of(run_dir / "model") for run_dir in run_dirs)
    assert all((model[key] - expected[key]).abs().max().item() < 1e-4 for key in expected)


@pytest.mark.full
def test_each_disk_has_the_layers_of_its_own_stage(tmp_path, models):
    a, b = (write_inputs(tmp_path / name, models["llama"]) for name in ("a", "b"))
    settings = (*SAVES, "parallel.stages=2", "train.gradient_accumulation_steps=2")
    finish(train_on_nodes([(a, 1), (b, 1)], *settings, "train.max_steps=2"))
    go_on([(a, 1), (b, 1)], *settings[len(SAVES) :], since=2, last=4)
    parts = [checkpoint(folder / "run", 4) for folder in (a, b)]
    one, other = (
        set(re.findall(r"\.layers\.(\d+)\.", " ".join(load_file(next(part.glob("rank_*"))))))
        for part in parts
    )
    assert one and other and one.isdisjoint(other)
    assert run(["verify", *map(str, parts)]) == 0
    assert run(["export", *map(str, parts), str(tmp_path / "out")]) == 0
    exported, written = ((f / "model.safetensors") for f in (tmp_path / "out", a / "run/model"))
    assert exported.read_bytes() == written.read_bytes()


@pytest.mark.full
def test_a_node_whose_part_is_gone_is_named(a, b, tmp_path, models):
    """With a new disk nothing is whole or touched; with an older part restored, the run resumes."""
    new = write_inputs(tmp_path / "new", models["glm"], dropout=0.2)
    before = digests(a / "run")
    done = train_on_nodes([(a, 2), (new, 1)], *SAVES, "train.max_steps=6")
    assert done.returncode == 2 and digests(a / "run") == before
    host = os.uname().nodename
    for line, step in zip(done.stderr.splitlines(), (4, 2), strict=False):
        missing = f"rank_00002.safetensors, written on node 1 ({host}), is missing"
        assert line == f"ERROR: checkpoint_000000{step}: {missing} - restore it from a copy"
    assert "run.resume=never" in done.stderr.splitlines()[-1]

    shutil.copytree(checkpoint(b / "run", 2), checkpoint(new / "run", 2))
    said = go_on([(a, 2), (new, 1)], since=2)
    assert f"Not accepted: checkpoint_0000004: {missing.partition(', is')[0]}" in said
    assert names(checkpoint(a / "run", 4).with_suffix(".aside1")) == names(checkpoint(a / "run", 4))


@pytest.mark.parametrize("renamed", ["a", pytest.param("none", marks=pytest.mark.full)])
def test_a_crash_between_the_phases_rolls_forward(renamed, a, b, whole):
    """Prepared everywhere, and renamed on one disk or on none."""
    for folder in (a, b):
        if folder.name != renamed:
            checkpoint(folder / "run", 4).rename(folder / "run/checkpoints" / STAGING)
    go_on([(a, 2), (b, 1)])
    assert steps_of(a / "run") == steps_of(whole)
    for folder in (a, b):
        assert names(folder / "run/checkpoints") == checkpoints_of(2, 4, 6)


@pytest.mark.full
def test_a_checkpoint_that_is_not_prepared_everywhere_gives_way(a, b, whole):
    """Only once the run resumes from another; a prepared part is moved aside."""
    for folder in (a, b):
        checkpoint(folder / "run", 4).rename(folder / "run/checkpoints" / STAGING)
    (b / "run/checkpoints" / STAGING / "COMPLETE").unlink()
    before = [digests(folder / "run") for folder in (a, b)]
    refused = train_on_nodes([(a, 2), (b, 1)], *SAVES, "train.max_steps=6", "run.seed=7")
    assert refused.returncode == 2 and [digests(folder / "run") for folder in (a, b)] == before

    said = go_on([(a, 2), (b, 1)], since=2)
    assert "Not accepted: checkpoint_0000004: rank_00002.safetensors" in said
    assert steps_of(a / "run") == steps_of(whole)
    for folder in (a, b):
        assert saved_steps(folder) == checkpoints_of(2, 4, 6)
    assert "COMPLETE" in names(checkpoint(a / "run", 4).with_suffix(".aside1"))
    assert not checkpoint(b / "run", 4).with_suffix(".aside1").exists()


def test_a_crash_in_the_first_save_is_no_reason_to_refuse(a, b, whole):
    for folder in (a, b):
        shutil.rmtree(checkpoint(folder / "run", 2))
    checkpoint(a / "run", 4).rename(a / "run/checkpoints" / STAGING)
    shutil.rmtree(checkpoint(b / "run", 4))
    done = train_on_nodes([(a, 2), (b, 1)], *SAVES, "train.max_steps=6")
    assert done.returncode == 0 and "Resumed" not in done.stdout, done.stderr
    assert "Not accepted: checkpoint_0000004: rank_00002.safetensors" in done.stdout
    assert steps_of(a / "run") == steps_of(whole)


def die_at_the_last_rename(arguments: list[str]) -> None:
    """On the first node."""
    rename = durable_fs.rename

    def die(old: Path, new: Path) -> None:
        if new.name == "checkpoint_0000006" and os.environ["GROUP_RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(old, new)

    durable_fs.rename = die
    run_script(arguments)


def test_a_node_that_dies_before_its_last_rename_loses_no_step(a, b, whole):
    nodes, given = [(a, 2), (b, 1)], (*SAVES, "train.max_steps=6")
    killed = train_on_nodes(nodes, *given, work=die_at_the_last_rename)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list((a / "run/checkpoints").glob(".checkpoint_0000006.*"))
    assert "Finished: checkpoint_0000006" in finish(train_on_nodes(nodes, *given))
    assert last_files(a, b) == digests(checkpoint(whole, 6), "*.safetensors")
    assert_same_tensors(a / "run/model", whole / "model")


def test_verify_and_export_take_all_parts(a, b, tmp_path, capsys):
    of = ((a, 4), (b, 4), (b, 2))
    one, other, older = (str(checkpoint(folder / "run", step)) for folder, step in of)
    written = []
    for number, parts in enumerate(([one, other], [other, one])):
        assert run(["verify", *parts]) == 0
        assert run(["export", *parts, str(tmp_path / f"out{number}")]) == 0
        written.append(digests(tmp_path / f"out{number}"))
    assert written[0] == written[1] and "model.safetensors" in written[0]
    capsys.readouterr()
    host = os.uname().nodename
    for parts, code, named in (
        ([one], 1, f"rank_00002.safetensors, written on node 1 ({host}), is missing"),
        ([other], 1, f"rank_00000.safetensors, written on node 0 ({host}), is missing"),
        ([one, older], 2, f"{older}: is not of the same checkpoint as {one}"),
    ):
        assert run(["verify", *parts]) == code
        assert f"ERROR: {named} - " in capsys.readouterr().err
        assert run(["export", *parts, str(tmp_path / "none")]) == 2
        assert re.fullmatch(
            r"ERROR: .* (is missing|is not of the same .*) - name .*\n", capsys.readouterr().err
        )
        assert not (tmp_path / "none").exists() and not (tmp_path / ".none.writing").exists()


def test_verify_reads_the_copies_of_all_parts(a, b, capsys):
    parts = [str(checkpoint(folder / "run", 4)) for folder in (a, b)]
    copy = Path(parts[1]) / "huggingface/config.json"
    copy.write_bytes(copy.read_bytes() + b" ")
    for named in (parts, parts[::-1]):
        assert run(["verify", *named]) == 1
        assert f"ERROR: {copy}: " in capsys.readouterr().err


def spoil(of: Checkpoint, rank: int, is_missing: bool) -> None:
    """The file of one rank, by a process that sees it, before any other goes on."""
    file = Path(f"run/checkpoints/{of.name}/rank_{rank:05d}.safetensors")
    if os.environ["RANK"] == "2" and is_missing:
        file.unlink()
    elif os.environ["RANK"] == "2":
        chunk = next(chunk for chunk in of.chunks[SPOILT] if chunk.file == file.name)
        flip_bit(file, chunk.begin)
    dist.barrier()


def damage_before_the_export(arguments: list[str], is_missing: bool) -> None:
    """Between the last save and the final model, on the second node's disk."""
    finish = Saver.finish

    def finish_and_damage(saver: Saver) -> Checkpoint:
        done = finish(saver)
        spoil(done, 2, is_missing)
        return done

    Saver.finish = finish_and_damage
    run_script(arguments)


@pytest.mark.parametrize("is_missing", [False, pytest.param(True, marks=pytest.mark.full)])
def test_no_rank_waits_for_a_damaged_part(is_missing, a, b):
    work = partial(damage_before_the_export, is_missing=is_missing)
    done = train_on_nodes([(a, 2), (b, 1)], *SAVES, "train.max_steps=6", work=work)
    assert done.returncode == 1 and "rank_00002.safetensors" in done.stderr
    assert not (a / "run/model").exists()
    assert is_missing or f"tensor {SPOILT} is damaged" in done.stderr.splitlines()[-1]


def damage_before_the_load(arguments: list[str], is_missing: bool) -> None:
    """Between the check of every byte and the load."""
    load = shardtune.checkpoint.load_checkpoint

    def damage_and_load(found: Checkpoint, *rest: Any) -> None:
        spoil(found, 0, is_missing)
        load(found, *rest)

    shardtune.checkpoint.load_checkpoint = damage_and_load
    run_script(arguments)


@pytest.mark.full
@pytest.mark.parametrize("is_missing", [False, True])
def test_damage_between_check_and_load_ends_all_ranks(is_missing, a, b):
    """The disks were swapped: the ranks wait for what the other node sends."""
    work = partial(damage_before_the_load, is_missing=is_missing)
    done = train_on_nodes([(b, 2), (a, 1)], *SAVES, "train.max_steps=6", work=work)
    assert done.returncode == 1 and "Step " not in done.stdout
    said = f"DamagedCheckpoint: .*/rank_00000.safetensors: tensor {SPOILT} is damaged"
    if is_missing:
        said = "FileNotFoundError: rank_00000.safetensors is in none of .*/checkpoint_0000004"
    last = done.stderr.splitlines()[-1]
    assert re.match(rf"ERROR: rank 2 on \S+: {said}, in loading the model - ", last), last


KEEP_2 = ("checkpoint.keep=2", "export.final=false")


@pytest.mark.full
def test_a_disk_that_comes_to_the_run_later_costs_no_checkpoint(a, b, tmp_path):
    """It may be node 0's, if all parts are on the other disks.

    An older checkpoint is deleted once `keep` newer ones are on all disks.
    """
    new = write_inputs(tmp_path / "new", a / "model", dropout=0.2)
    for file in checkpoint(b / "run", 4).glob("rank_*"):
        shutil.copy(file, checkpoint(a / "run", 4))
    for last, of_new, of_old in ((6, (6,), (2, 4, 6)), (8, (6, 8), (6, 8))):
        go_on([(new, 1), (a, 2)], *KEEP_2, since=last - 2, last=last)
        for folder, steps in ((new, of_new), (a, of_old)):
            assert names(folder / "run/checkpoints") == checkpoints_of(*steps)


def test_a_checkpoint_that_one_disk_did_not_commit_does_not_count(a, b):
    unnamed = Fault("rename", "*/.checkpoint_0000006.*", fails(errno.EIO), rank=2)
    given, work = (*SAVES, *KEEP_2, "train.max_steps=8"), partial(run_with, [unnamed])
    said = finish(train_on_nodes([(a, 2), (b, 1)], *given, work=work))
    assert "Not saved: checkpoint_0000006: rank 2 on " in said
    for folder, steps in ((a, (4, 6, 8)), (b, (4, 8))):
        assert saved_steps(folder) == checkpoints_of(*steps)
