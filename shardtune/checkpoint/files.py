"""A checkpoint's directory: written beside its place and renamed into it, read only if its digests hold."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from safetensors.torch import save_file

from ..errors import Refused

_NAME = re.compile(r"checkpoint_(\d{7,})")
_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: its directory and its manifest, which COMPLETE vouches for."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def state(self) -> Mapping[str, Any]:
        """What the run put beside its tensors."""
        return cast(Mapping[str, Any], self.manifest["state"])

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def world_size(self) -> int:
        return int(self.manifest["world"]["size"])


def checkpoint_name(step: int) -> str:
    return f"checkpoint_{step:07d}"


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def digest(path: Path) -> str:
    """xxh3_128 of a file's bytes, in hexadecimal."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            hasher.update(block)
    return hasher.hexdigest()


def find_checkpoints(directory: Path) -> list[Path]:
    """What has the name of a checkpoint in `directory`, newest first, intact or not."""
    if not directory.is_dir():
        return []
    named = [(int(match[1]), entry) for entry in directory.iterdir() if (match := _NAME.fullmatch(entry.name))]
    return [entry for _, entry in sorted(named, reverse=True)]


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the manifest.

    Raises:
        Refused: COMPLETE is missing, or does not hold the manifest's digest; or another version wrote it.
    """
    try:
        complete = (path / "COMPLETE").read_bytes().strip()
        raw = (path / "manifest.json").read_bytes()
    except OSError as error:
        raise Refused(f"{path}: not a complete checkpoint ({error}) - resume from another one") from error
    if xxhash.xxh3_128(raw).hexdigest().encode() != complete:
        raise Refused(f"{path / 'manifest.json'}: is not what COMPLETE vouches for - resume from another checkpoint")
    manifest = json.loads(raw)
    if manifest["format"] != _FORMAT:
        raise Refused(
            f"{path}: has format {manifest['format']} and this version reads {_FORMAT} - resume with the "
            "version that wrote it"
        )
    return Checkpoint(path, manifest)


def prepare_directory(checkpoints: Path, step: int) -> Path:
    """The hidden sibling that a save is written to; what interrupted saves and deletions left there is gone."""
    for abandoned in checkpoints.glob(".checkpoint_*"):
        shutil.rmtree(abandoned)
    temporary = checkpoints / f".{checkpoint_name(step)}.writing"
    temporary.mkdir(parents=True)
    return temporary


def write_rank_file(directory: Path, rank: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write and sync one rank's tensors; the file's name, size in bytes and digest."""
    path = directory / rank_file(rank)
    save_file(dict(tensors), path, metadata={"format": "pt"})
    sync(path)
    return {"file": path.name, "bytes": path.stat().st_size, "xxh3_128": digest(path)}


def check_rank_file(checkpoint: Checkpoint, rank: int) -> Path:
    """The path of one rank's file, read once to compare its digest.

    Raises:
        Refused: the file is missing, or is not what was written.
    """
    entry = checkpoint.manifest["files"][rank]
    path = checkpoint.path / entry["file"]
    if not path.is_file():
        raise Refused(f"{path}: this part of the checkpoint is missing - restore it, or resume from another one")
    if path.stat().st_size != entry["bytes"] or digest(path) != entry["xxh3_128"]:
        raise Refused(f"{path}: its bytes are not those that were saved - restore it, or resume from another one")
    return path


def commit(temporary: Path, checkpoints: Path, manifest: Mapping[str, Any]) -> Path:
    """Write manifest and COMPLETE, then make the checkpoint visible by one rename."""
    raw = json.dumps({"format": _FORMAT, **manifest}, indent=1).encode()
    (temporary / "manifest.json").write_bytes(raw)
    sync(temporary / "manifest.json")
    (temporary / "COMPLETE").write_text(xxhash.xxh3_128(raw).hexdigest() + "\n", encoding="utf-8")
    sync(temporary / "COMPLETE")
    sync(temporary)
    final = checkpoints / checkpoint_name(manifest["state"]["step"])
    if final.exists():
        move_aside(final)
    temporary.rename(final)
    sync(checkpoints)
    return final


def move_aside(path: Path) -> Path:
    """Rename what is in the way, so that it is neither overwritten nor deleted; the new name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.aside{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def keep_newest(checkpoints: Path, keep: int) -> None:
    """Delete the others; each loses its name first, so that none is ever seen in part."""
    for old in find_checkpoints(checkpoints)[keep:]:
        nameless = old.with_name(f".{old.name}.deleting")
        old.rename(nameless)
        shutil.rmtree(nameless)


def sync(path: Path) -> None:
    """Flush a file or a directory to its disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
