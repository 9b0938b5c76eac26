"""`verify`: its exit codes, its messages, and how much it reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.small_runs import checkpoint
from helpers.thread_ranks import save_steps

from shardtune.__main__ import run
from shardtune.checkpoint import verify_checkpoint
from shardtune.checkpoint.assets import LISTING, listing_json


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""
    save_steps((2,), 2, [tmp_path / "run"], keep=1)
    return checkpoint(tmp_path / "run", 2)


def verified(directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, list[str]]:
    """The exit code, standard output, and the lines on standard error."""
    code = run(["verify", str(directory)])
    out, err = capsys.readouterr()
    return code, out, err.splitlines()


def test_each_bad_file_has_a_line(saved, capsys):
    first, second = (saved / f"rank_0000{rank}.safetensors" for rank in (0, 1))
    first.write_bytes(first.read_bytes() + b"\0")
    second.unlink()
    code, out, (damaged, missing) = verified(saved, capsys)
    assert (code, out) == (1, "")
    assert re.fullmatch(
        rf"ERROR: {first}: is damaged \(its length is not \d+\) "
        "- restore it from a copy, or use another checkpoint",
        damaged,
    )
    assert re.fullmatch(
        rf"ERROR: {second.name}, written on node 1 \(\S+\), is missing "
        "- name all parts of the checkpoint, or restore it from a copy",
        missing,
    )


def test_a_checkpoint_without_complete_or_manifest_is_refused(saved, capsys):
    (saved / "manifest.json").rename(saved / "kept")
    code, _, (error,) = verified(saved, capsys)
    assert code == 1 and error.startswith(f"ERROR: {saved}/manifest.json: cannot be read (No such")
    (saved / "kept").rename(saved / "manifest.json")
    (saved / "COMPLETE").unlink()
    code, _, (error,) = verified(saved, capsys)
    assert code == 1 and error.startswith(f"ERROR: {saved}/COMPLETE: cannot be read (No such file")


@pytest.mark.parametrize("argument", ["manifest.json", "nothing", "x" * 300, "", ".."])
def test_a_path_that_is_no_checkpoint_is_refused(argument, saved, monkeypatch, capsys):
    monkeypatch.chdir(saved)
    (saved / "COMPLETE").rename(saved / "complete")
    (saved / "manifest.json").rename(saved / "manifest")
    code, _, (error,) = verified(Path(argument), capsys)
    assert code == 2
    assert re.fullmatch(
        rf"ERROR: {Path(argument)}: not a complete checkpoint \(.+\) - use another one", error
    )


def test_verify_reads_each_byte_once(saved):
    def bytes_read() -> int:
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text(encoding="utf-8"))[1])

    before = bytes_read()
    read_by_asking = bytes_read() - before
    before = bytes_read()
    assert verify_checkpoint([saved]) == []
    read = bytes_read() - before - read_by_asking
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    assert 0 <= read - size < 500


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"[" * 100_000,
        listing_json({"checkpoint": {}}),
        listing_json({"format": 2, "files": {}}),
    ],
)
def test_an_export_json_that_cannot_be_used_is_named(content, tmp_path, capsys):
    (tmp_path / LISTING).write_bytes(content)
    assert run(["verify", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"ERROR: {tmp_path / LISTING}: is damaged - ")
