"""Damaged checkpoints: `verify` and a start name the damage, and the one before is taken."""

import itertools
import logging
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.ranks import world_of
from helpers.small_runs import checkpoint, flip_bit
from helpers.thread_ranks import Tiny, TinyConfig, save_steps

from shardtune.__main__ import run
from shardtune.checkpoint import agree_on_checkpoint, verify_checkpoint
from shardtune.checkpoint.assets import LISTING, listing_json
from shardtune.checkpoint.manifest import ASSETS
from shardtune.checkpoint.run_dir import RunDir
from shardtune.errors import UserError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    save_steps((1, 2, 3), 2, [folder / "run"], keep=3, model=Tiny(TinyConfig(), width=400))
    return folder


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardtune")


def resumed_step(folder: Path, resume: str = "auto") -> int:
    run_dir = RunDir(folder / "run", [0], None)
    checkpoint = agree_on_checkpoint(run_dir, resume, world_of(0, 1, dist.HashStore()))
    return checkpoint.step if checkpoint else 0


def flips(newest: Path) -> Iterator[tuple[Path, int, int]]:
    """200 bits of a checkpoint, as many of each of its files; and all of its smallest file."""
    source, files = random.Random(0), sorted(path for path in newest.rglob("*") if path.is_file())
    for number in range(200):
        file = files[number % len(files)]
        yield file, source.randrange(file.stat().st_size), source.randrange(8)
    yield from (
        (newest / "COMPLETE", offset, bit) for offset, bit in itertools.product(range(33), range(8))
    )


def test_every_flipped_bit_is_found_and_named(saved, tmp_path, caplog):
    folder = Path(shutil.copytree(saved, tmp_path / "here"))
    newest = folder / "run/checkpoints/checkpoint_0000003"
    for file, offset, bit in flips(newest):
        flip_bit(file, offset, bit)
        named = str(file).replace("COMPLETE", "manifest.json")
        assert resumed_step(folder) == 2, (file, offset, bit)
        assert f"Not accepted: {named}: " in caplog.text
        caplog.clear()
        (problem,) = verify_checkpoint([newest])
        assert problem.startswith(f"{named}: ") and "restore it from a copy" in problem
        flip_bit(file, offset, bit)
    assert resumed_step(folder) == 3


def truncated(checkpoint: Path) -> str:
    os.truncate(checkpoint / "rank_00001.safetensors", 10_000)
    return "rank_00001.safetensors: is damaged (its length is not "


def extended(checkpoint: Path) -> str:
    with (checkpoint / "rank_00000.safetensors").open("ab") as file:
        file.write(b"0")
    return "rank_00000.safetensors: is damaged (its length is not "


def swapped(checkpoint: Path) -> str:
    files = [checkpoint / f"rank_0000{rank}.safetensors" for rank in (0, 1)]
    files[0].rename(checkpoint / "other")
    files[1].rename(files[0])
    (checkpoint / "other").rename(files[1])
    return "rank_00000.safetensors: is damaged"


def missing(checkpoint: Path) -> str:
    (checkpoint / "rank_00001.safetensors").unlink()
    return "rank_00001.safetensors, written on node 1 ("


def missing_asset(checkpoint: Path) -> str:
    (checkpoint / ASSETS / "tokenizer.json").unlink()
    return "huggingface/tokenizer.json, written on node 0 ("


def foreign(checkpoint: Path) -> str:
    shutil.copy(checkpoint.with_name("checkpoint_0000002") / "rank_00001.safetensors", checkpoint)
    return "rank_00001.safetensors: is damaged"


def foreign_manifest(checkpoint: Path) -> str:
    for name in ("manifest.json", "COMPLETE"):
        shutil.copy(checkpoint.with_name("checkpoint_0000002") / name, checkpoint)
    return "checkpoint_0000003: "


def foreign_complete(checkpoint: Path) -> str:
    shutil.copy(checkpoint.with_name("checkpoint_0000002") / "COMPLETE", checkpoint)
    return "manifest.json: does not match the digest in COMPLETE"


DAMAGES = [truncated, extended, swapped, missing, missing_asset, foreign, foreign_manifest]


@pytest.mark.parametrize("damage", [*DAMAGES, foreign_complete])
def test_damage_is_named_and_the_checkpoint_before_is_taken(damage, saved, tmp_path, caplog):
    folder = Path(shutil.copytree(saved, tmp_path / "here"))
    newest = folder / "run/checkpoints/checkpoint_0000003"
    named = damage(newest)
    assert verify_checkpoint([newest])
    assert resumed_step(folder) == 2
    assert "Not accepted: " in caplog.text and "checkpoint_0000003" in caplog.text
    assert named in caplog.text
    if damage is not foreign_manifest:
        with pytest.raises(UserError, match=re.escape(named)):
            resumed_step(folder, str(newest))
    for step in (1, 2):
        shutil.rmtree(newest.with_name(f"checkpoint_000000{step}"))
    with pytest.raises(UserError):  # a start anew would lose it
        resumed_step(folder)


@pytest.fixture
def of_two(tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""
    save_steps((2,), 2, [tmp_path / "run"], keep=1)
    return checkpoint(tmp_path / "run", 2)


def verified(directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, list[str]]:
    """The exit code, standard output, and the lines on standard error."""
    code = run(["verify", str(directory)])
    out, err = capsys.readouterr()
    return code, out, err.splitlines()


def test_each_bad_file_has_a_line(of_two, capsys):
    first, second = (of_two / f"rank_0000{rank}.safetensors" for rank in (0, 1))
    first.write_bytes(first.read_bytes() + b"\0")
    second.unlink()
    code, out, (damaged, missing) = verified(of_two, capsys)
    assert (code, out) == (1, "")
    assert re.match(rf"ERROR: {first}: is damaged \(its length is not \d+\) - ", damaged)
    assert re.match(rf"ERROR: {second.name}, written on node 1 \(\S+\), is missing - ", missing)


def test_a_checkpoint_without_complete_or_manifest_is_refused(of_two, capsys):
    (of_two / "manifest.json").rename(of_two / "kept")
    code, _, (error,) = verified(of_two, capsys)
    assert code == 1 and error.startswith(f"ERROR: {of_two}/manifest.json: cannot be read (")
    (of_two / "kept").rename(of_two / "manifest.json")
    (of_two / "COMPLETE").unlink()
    code, _, (error,) = verified(of_two, capsys)
    assert code == 1 and error.startswith(f"ERROR: {of_two}/COMPLETE: cannot be read (")


@pytest.mark.parametrize("argument", ["manifest.json", "nothing", "x" * 300, "", ".."])
def test_a_path_that_is_no_checkpoint_is_refused(argument, of_two, monkeypatch, capsys):
    monkeypatch.chdir(of_two)
    (of_two / "COMPLETE").rename(of_two / "complete")
    (of_two / "manifest.json").rename(of_two / "manifest")
    code, _, (error,) = verified(Path(argument), capsys)
    assert code == 2
    assert error.startswith(f"ERROR: {Path(argument)}: not a complete checkpoint (")


def test_verify_reads_each_byte_once(of_two):
    def bytes_read() -> int:
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text(encoding="utf-8"))[1])

    before = bytes_read()
    read_by_asking = bytes_read() - before
    before = bytes_read()
    assert verify_checkpoint([of_two]) == []
    read = bytes_read() - before - read_by_asking
    size = sum(path.stat().st_size for path in of_two.rglob("*") if path.is_file())
    assert 0 <= read - size < 500


UNUSABLE = [b"[]", b"[" * 100_000, listing_json({"checkpoint": {}})]


@pytest.mark.parametrize("content", [*UNUSABLE, listing_json({"format": 2, "files": {}})])
def test_an_export_json_that_cannot_be_used_is_named(content, tmp_path, capsys):
    (tmp_path / LISTING).write_bytes(content)
    assert run(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"ERROR: {tmp_path / LISTING}: is damaged - ")
