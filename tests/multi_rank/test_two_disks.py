"""Nodes that do not share run.dir: each has its own folder, and run.dir is a relative path."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers.commands import finish
from helpers.faults import Fault, fails, run_with
from helpers.ranks import on_nodes, run_script, train, train_on_nodes
from helpers.small_runs import (
    CONSTANT,
    SETTINGS,
    checkpoint,
    close_to,
    digests,
    names,
    steps_of,
    write_inputs,
)
from safetensors.torch import load_file

import shardtune.checkpoint
from shardtune.__main__ import run
from shardtune.checkpoint import Checkpoint, Saver, durable_fs

SAVES = (*SETTINGS, *CONSTANT, "checkpoint.every_steps=2", "checkpoint.keep=9")
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


def test_a_run_on_two_disks_goes_on_as_on_one(a, b, whole):
    done = train_on_nodes([(a, 2), (b, 1)], *SAVES, "train.max_steps=6")
    assert done.returncode == 0 and "Resumed from checkpoint_0000004\n" in done.stdout, done.stderr
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
    exported = digests(a / "run/model")
    assert exported.pop("export.json") and {"export.json": None} | exported == digests(
        whole / "model"
    ) | {"export.json": None}
    assert names(b / "run") == [".lock", "checkpoints"] and len(names(a / "run")) == 6


@pytest.mark.parametrize(
    "layout",
    [
        [("b", 2), ("a", 1)],
        pytest.param([("b", 1), ("a", 2)], marks=pytest.mark.full),
        pytest.param([("a", 1), ("b", 2)], marks=pytest.mark.full),
    ],
)
def test_ranks_may_find_their_parts_on_another_disk(layout, a, b, whole):
    """After disks are swapped or ranks moved between nodes, the run is the same."""
    nodes = [({"a": a, "b": b}[name], ranks) for name, ranks in layout]
    done = train_on_nodes(nodes, *SAVES, "train.max_steps=6")
    assert done.returncode == 0 and "Resumed from checkpoint_0000004\n" in done.stdout, done.stderr
    is_swapped = nodes[0][0] == b
    assert steps_of(nodes[0][0] / "run") == steps_of(whole)[4 * is_swapped :]
    assert ("metrics.jsonl: the steps up to 4 are on node 1 (" in done.stdout) == is_swapped
    assert last_files(a, b) == digests(checkpoint(whole, 6), "*.safetensors")
    assert (nodes[0][0] / "run/model/model.safetensors").read_bytes() == (
        whole / "model/model.safetensors"
    ).read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"b": 1, "a": 1}, {"a": 3, "b": 1}, {"a": 1, "c": 1, "b": 2}])
def test_a_run_resumes_on_another_number_of_ranks_and_of_disks(sizes, tmp_path, models):
    settings = (*SAVES, "export.final=true")

    def go_on(root: Path, nodes: dict[str, int], last: int) -> str:
        rows = f"train.gradient_accumulation_steps={12 // sum(nodes.values())}"
        return finish(
            train_on_nodes(
                [(root / name, n) for name, n in nodes.items()],
                *settings,
                rows,
                f"train.max_steps={last}",
            )
        )

    for name in {"a", "b", *sizes}:
        write_inputs(tmp_path / name, models["glm"])
    write_inputs(tmp_path / "one", models["glm"])
    go_on(tmp_path, {"a": 2, "b": 1}, 2)
    assert "Resumed from checkpoint_0000002\n" in go_on(tmp_path, sizes, 4)
    go_on(tmp_path, {"one": 1}, 4)
    first = tmp_path / next(iter(sizes))
    assert steps_of(first / "run")[-2:] == close_to(steps_of(tmp_path / "one/run")[-2:])
    model, expected = (
        load_file(folder / "run/model/model.safetensors") for folder in (first, tmp_path / "one")
    )
    assert all((model[key] - expected[key]).abs().max().item() < 1e-4 for key in expected)


@pytest.mark.full
def test_each_disk_has_the_layers_of_its_own_stage(tmp_path, models):
    a, b = (write_inputs(tmp_path / name, models["llama"]) for name in ("a", "b"))
    settings = (*SAVES, "parallel.stages=2", "train.gradient_accumulation_steps=2")
    for steps in (2, 4):
        said = finish(train_on_nodes([(a, 1), (b, 1)], *settings, f"train.max_steps={steps}"))
    assert "Resumed from checkpoint_0000002\n" in said
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
    done = train_on_nodes([(a, 2), (new, 1)], *SAVES, "train.max_steps=6")
    assert done.returncode == 0 and "Resumed from checkpoint_0000002\n" in done.stdout, done.stderr
    assert (
        f"Not accepted: checkpoint_0000004: rank_00002.safetensors, written on node 1 ({host})"
        in done.stdout
    )
    aside = {
        f"checkpoint_0000004.aside1/{name}"
        for name in names(checkpoint(a / "run", 4))
        if "." in name
    }
    assert (
        aside - {"checkpoint_0000004.aside1/huggingface"} <= digests(a / "run/checkpoints").keys()
    )


@pytest.mark.parametrize(
    "renamed", ["a", *(pytest.param(each, marks=pytest.mark.full) for each in ("b", "none"))]
)
def test_a_crash_between_the_phases_rolls_forward(renamed, a, b, whole):
    """Prepared everywhere, and renamed on one disk or on none."""
    for folder in (a, b):
        if folder.name != renamed:
            checkpoint(folder / "run", 4).rename(folder / "run/checkpoints" / STAGING)
    done = train_on_nodes([(a, 2), (b, 1)], *SAVES, "train.max_steps=6")
    assert done.returncode == 0 and "Resumed from checkpoint_0000004\n" in done.stdout, done.stderr
    assert steps_of(a / "run") == steps_of(whole)
    for folder in (a, b):
        assert names(folder / "run/checkpoints") == [
            f"checkpoint_000000{step}" for step in (2, 4, 6)
        ]


@pytest.mark.full
def test_an_uncommitted_part_is_moved_aside_with_the_damaged_other(a, b):
    """One disk had committed, so it is a checkpoint, which restoring the damaged part mends."""
    checkpoint(b / "run", 4).rename(b / "run/checkpoints" / STAGING)
    parts = digests(b / "run/checkpoints" / STAGING)
    damaged = checkpoint(a / "run", 4) / "rank_00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    done = train_on_nodes([(a, 2), (b, 1)], *SAVES, "train.max_steps=3")
    assert done.returncode == 0 and "Resumed from checkpoint_0000002\n" in done.stdout, done.stderr
    for folder in (a, b):
        assert (folder / "run/checkpoints/checkpoint_0000004.aside1").is_dir()
    assert digests(b / "run/checkpoints/checkpoint_0000004.aside1") == parts


@pytest.mark.full
@pytest.mark.parametrize("lacks", ["COMPLETE", "everything"])
def test_a_checkpoint_that_is_not_prepared_everywhere_gives_way(lacks, a, b, whole):
    """Only once the run resumes from another; a prepared part is moved aside."""
    for folder in (a, b):
        checkpoint(folder / "run", 4).rename(folder / "run/checkpoints" / STAGING)
    if lacks == "COMPLETE":
        (b / "run/checkpoints" / STAGING / "COMPLETE").unlink()
    else:
        shutil.rmtree(b / "run/checkpoints" / STAGING)
    before = [digests(folder / "run") for folder in (a, b)]
    refused = train_on_nodes([(a, 2), (b, 1)], *SAVES, "train.max_steps=6", "run.seed=7")
    assert refused.returncode == 2 and [digests(folder / "run") for folder in (a, b)] == before

    done = train_on_nodes([(a, 2), (b, 1)], *SAVES, "train.max_steps=6")
    assert done.returncode == 0 and "Resumed from checkpoint_0000002\n" in done.stdout, done.stderr
    assert "Not accepted: checkpoint_0000004: rank_00002.safetensors" in done.stdout
    assert steps_of(a / "run") == steps_of(whole)
    for folder in (a, b):
        kept = [name for name in names(folder / "run/checkpoints") if "aside" not in name]
        assert kept == [f"checkpoint_000000{step}" for step in (2, 4, 6)]
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


def die_at_the_last_rename(arguments: list[str], node: str) -> None:
    rename = durable_fs.rename

    def die(old: Path, new: Path) -> None:
        if new.name == "checkpoint_0000006" and os.environ["GROUP_RANK"] == node:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(old, new)

    durable_fs.rename = die
    run_script(arguments)


@pytest.mark.parametrize("node", ["0", pytest.param("1", marks=pytest.mark.full)])
def test_a_node_that_dies_before_its_last_rename_loses_no_step(node, a, b, whole):
    arguments = ["--config", "config.yaml", *SAVES, "train.max_steps=6"]
    killed = on_nodes([(a, 2), (b, 1)], die_at_the_last_rename, arguments, node)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert any(
        name.startswith(".checkpoint_0000006.")
        for name in names((a, b)[int(node)] / "run/checkpoints")
    )
    again = on_nodes([(a, 2), (b, 1)], run_script, arguments)
    assert again.returncode == 0 and "Finished: checkpoint_0000006" in again.stdout, again.stderr
    assert last_files(a, b) == digests(checkpoint(whole, 6), "*.safetensors")
    assert (a / "run/model/model.safetensors").read_bytes() == (
        whole / "model/model.safetensors"
    ).read_bytes()


def test_verify_and_export_take_all_parts(a, b, tmp_path, capsys):
    one, other, older = (
        str(checkpoint(a / "run", 4)),
        str(checkpoint(b / "run", 4)),
        str(checkpoint(b / "run", 2)),
    )
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


def spoil(of: Checkpoint, rank: int, damage: str) -> None:
    """The file of one rank, by a process that sees it, before any other goes on."""
    file = Path(f"run/checkpoints/{of.name}/rank_{rank:05d}.safetensors")
    if os.environ["RANK"] == "2" and damage == "missing":
        file.unlink()
    elif os.environ["RANK"] == "2" and damage == "truncated":
        os.truncate(file, 3000)
    elif os.environ["RANK"] == "2":
        content = bytearray(file.read_bytes())
        chunk = next(chunk for chunk in of.chunks[SPOILT] if chunk.file == file.name)
        content[chunk.begin] ^= 1
        file.write_bytes(content)
    dist.barrier()


def damage_before_the_export(arguments: list[str], damage: str) -> None:
    """Between the last save and the final model, on the second node's disk."""
    finish = Saver.finish

    def finish_and_damage(saver: Saver) -> Checkpoint:
        done = finish(saver)
        spoil(done, 2, damage)
        return done

    Saver.finish = finish_and_damage
    run_script(arguments)


@pytest.mark.parametrize(
    "damage",
    [
        "flipped",
        *(pytest.param(damage, marks=pytest.mark.full) for damage in ("truncated", "missing")),
    ],
)
def test_no_rank_waits_for_a_damaged_part(damage, a, b):
    arguments = ["--config", "config.yaml", *SAVES, "train.max_steps=6"]
    done = on_nodes([(a, 2), (b, 1)], damage_before_the_export, arguments, damage)
    assert done.returncode == 1 and "rank_00002.safetensors" in done.stderr
    assert not (a / "run/model").exists()
    if damage == "flipped":
        assert f"tensor {SPOILT} is damaged" in done.stderr.splitlines()[-1]


def damage_before_the_load(arguments: list[str], damage: str) -> None:
    """Between the check of every byte and the load."""
    load = shardtune.checkpoint.load_checkpoint

    def damage_and_load(found: Checkpoint, *rest: Any) -> None:
        spoil(found, 0, damage)
        load(found, *rest)

    shardtune.checkpoint.load_checkpoint = damage_and_load
    run_script(arguments)


@pytest.mark.full
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            "flipped",
            f"DamagedCheckpoint: .*/rank_00000.safetensors: tensor {SPOILT} is damaged",
        ),
        (
            "missing",
            "FileNotFoundError: rank_00000.safetensors is in none of .*/checkpoint_0000004",
        ),
    ],
)
def test_damage_between_check_and_load_ends_all_ranks(damage, said, a, b):
    """The disks were swapped: the ranks wait for what the other node sends."""
    arguments = ["--config", "config.yaml", *SAVES, "train.max_steps=6"]
    done = on_nodes([(b, 2), (a, 1)], damage_before_the_load, arguments, damage)
    assert done.returncode == 1 and "Step " not in done.stdout
    assert re.match(
        rf"ERROR: rank 2 on \S+: {said}, in loading the model - ", done.stderr.splitlines()[-1]
    )


KEEP_2 = (*SAVES[:-1], "checkpoint.keep=2", "export.final=false")


@pytest.mark.full
def test_a_disk_that_comes_to_the_run_later_costs_no_checkpoint(a, b, tmp_path):
    """It may be node 0's, if all parts are on the other disks.

    An older checkpoint is deleted once `keep` newer ones are on all disks.
    """
    new = write_inputs(tmp_path / "new", a / "model", dropout=0.2)
    for file in checkpoint(b / "run", 4).glob("rank_*"):
        shutil.copy(file, checkpoint(a / "run", 4))
    for last, of_new, of_old in ((6, [6], [2, 4, 6]), (8, [6, 8], [6, 8])):
        done = train_on_nodes([(new, 1), (a, 2)], *KEEP_2, f"train.max_steps={last}")
        assert (
            done.returncode == 0 and f"Resumed from checkpoint_000000{last - 2}\n" in done.stdout
        ), done.stderr
        for folder, steps in ((new, of_new), (a, of_old)):
            assert names(folder / "run/checkpoints") == [
                f"checkpoint_000000{step}" for step in steps
            ]


def test_a_checkpoint_that_one_disk_did_not_commit_does_not_count(a, b):
    unnamed = Fault("rename", "*/.checkpoint_0000006.*", fails(errno.EIO), rank=2)
    arguments = ["--config", "config.yaml", *KEEP_2, "train.max_steps=8"]
    done = on_nodes([(a, 2), (b, 1)], run_with, [unnamed], arguments)
    assert done.returncode == 0 and "Not saved: checkpoint_0000006: rank 2 on " in done.stdout, (
        done.stderr
    )
    for folder, steps in ((a, (4, 6, 8)), (b, (4, 8))):
        named = [name for name in names(folder / "run/checkpoints") if not name.startswith(".")]
        assert named == [f"checkpoint_000000{step}" for step in steps]
