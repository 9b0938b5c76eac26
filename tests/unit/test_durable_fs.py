"""Files and names of a checkpoint last whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardtune.checkpoint import durable_fs


@pytest.mark.parametrize("content", [b"", b"short", b"longer than what stood here before"])
def test_a_file_has_its_new_content_alone_whatever_a_write_that_was_killed_left(content, tmp_path):
    file = tmp_path / "manifest.json"
    for left in (file, file.with_suffix(".tmp")):
        left.write_bytes(b"what stood here before")
    durable_fs.replace_file(file, content)
    assert file.read_bytes() == content
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("has_earlier", [False, True])
def test_a_rename_whose_sync_fails_is_undone(has_earlier, tmp_path, monkeypatch):
    """Else a power cut may take the new name, of which others have read."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("old")
    if has_earlier:
        new.write_text("earlier")

    def fail(path: Path) -> None:
        if new.exists() and new.read_text() == "old":
            raise OSError("no sync")

    monkeypatch.setattr(durable_fs, "sync_directory", fail)
    with pytest.raises(OSError, match="no sync"):
        durable_fs.rename(old, new)
    assert old.read_text() == "old" and not os.path.lexists(new)
