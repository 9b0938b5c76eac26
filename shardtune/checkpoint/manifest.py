"""The names of a checkpoint's files, and the manifest that describes them."""

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
import transformers
import xxhash

from shardtune.distributed.tensors import DTYPES
from shardtune.distributed.world import World
from shardtune.errors import UserError
from shardtune.run_files import VERSION

FORMAT = 3
ASSETS = "huggingface"
PARTIAL = ".partial"  # ends the name of a copy of another disk's file until it is whole
RESTORE = "restore it from a copy, or use another checkpoint"  # the remedy of DamagedCheckpoint
_NAME = re.compile(r"checkpoint_(\d{7,})")


class DamagedCheckpoint(Exception):
    """A file differs from the one that was saved; the message names the file and the tensor."""


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor, by first index and size in each dimension, and the place of its bytes."""

    tensor: str
    offsets: Sequence[int]
    sizes: Sequence[int]
    file: str
    begin: int
    end: int
    xxh3_128: str

    @property
    def whole(self) -> list[slice]:
        """The box of the whole chunk, in its own coordinates."""
        return [slice(0, size) for size in self.sizes]

    @property
    def place(self) -> tuple[slice, ...]:
        """The box of the tensor that the chunk fills."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest matches its COMPLETE, or a model with its export.json.

    `directories` has one entry per disk that holds a part. `holders` lists, for each file, the
    disks that have it, each by its first rank.
    """

    name: str
    manifest: Mapping[str, Any]
    digest: str
    directories: Sequence[Path]
    holders: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def state(self) -> Mapping[str, Any]:
        """The state of the run that is not a tensor."""
        return cast(Mapping[str, Any], self.manifest["state"])

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def world_size(self) -> int:
        return int(self.manifest["world"]["size"])

    @property
    def files(self) -> Mapping[str, Mapping[str, Any]]:
        """Size, digest, rank, node and host of each file, by its name."""
        return cast(Mapping[str, Mapping[str, Any]], self.manifest["files"])

    @cached_property
    def chunks(self) -> dict[str, list[StoredChunk]]:
        tensors = self.manifest["tensors"].items()
        return {name: [StoredChunk(name, **c) for c in entry["chunks"]] for name, entry in tensors}

    def dtype(self, tensor: str) -> torch.dtype:
        return DTYPES[self.manifest["tensors"][tensor]["dtype"]]

    def shape(self, tensor: str) -> torch.Size:
        return torch.Size(self.manifest["tensors"][tensor]["shape"])

    def find(self, file: str) -> Path | None:
        return next(iter(self.find_all(file)), None)

    def find_all(self, file: str) -> list[Path]:
        """Return the paths of a file in all directories that have it, as assets are on every
        disk."""
        return [path for directory in self.directories if (path := directory / file).is_file()]

    def why_missing(self, file: str) -> str:
        """Describe a missing file, and on which node it was written."""
        entry = self.files[file]
        if "node" not in entry:  # an exported model's
            return f"{self.directories[0] / file}: is missing"
        return f"{file}, written on node {entry['node']} ({entry['host']}), is missing"


def checkpoint_name(step: int) -> str:
    return f"checkpoint_{step:07d}"


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1])


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def find_checkpoints(directory: Path) -> list[Path]:
    """Return the entries of `directory` with a checkpoint's name, newest first, intact or not."""
    entries = directory.iterdir() if directory.is_dir() else ()
    return sorted((e for e in entries if _NAME.fullmatch(e.name)), key=step_of, reverse=True)


def find_committed(directory: Path) -> list[Path]:
    """Return the checkpoints in `directory` that have their COMPLETE, newest first."""
    return [path for path in find_checkpoints(directory) if (path / "COMPLETE").is_file()]


def build_manifest(
    reports: Sequence[Mapping[str, Any]],
    kinds: Mapping[str, tuple[str, Sequence[int]]],
    tied_weights: Mapping[str, str],
    state: Mapping[str, Any],
    hosts: Sequence[Mapping[str, Any]],
    world: World,
) -> dict[str, Any]:
    """Describe the files that all ranks reported.

    `kinds` has the dtype and shape of each tensor. `tied_weights` maps each name that is not stored
    to the stored name of the same weight. `hosts` has `node` and `host` of each rank. Raises
    ValueError.
    """
    entries: dict[str, Any] = {
        name: {"dtype": dtype, "shape": shape, "chunks": []}
        for name, (dtype, shape) in kinds.items()
    }
    files: dict[str, Any] = {}
    for rank, report in enumerate(reports):
        files[rank_file(rank)] = {**report["file"], "rank": rank, **hosts[rank]}
        for name, chunk in report["chunks"].items():
            random_state = {"dtype": chunk.pop("dtype"), "shape": chunk["sizes"], "chunks": []}
            entries.setdefault(name, random_state)["chunks"].append(chunk)
    for name, asset in reports[0]["assets"].items():
        files[name] = {**asset, "rank": 0, **hosts[0]}
    for name, entry in entries.items():
        covered = sum(torch.Size(chunk["sizes"]).numel() for chunk in entry["chunks"])
        if covered != torch.Size(entry["shape"]).numel():
            raise ValueError(f"{covered} elements of {name} {entry['shape']} were written")
    config = json.dumps(state["config"], sort_keys=True).encode()
    mesh = zip(world.mesh.mesh_dim_names or (), world.mesh.shape, strict=True)
    return {
        "format": FORMAT,
        "state": state,
        "config_xxh3_128": xxhash.xxh3_128(config).hexdigest(),
        "world": {
            "size": world.size,
            "mesh": dict(mesh),
            "nodes": [host["node"] for host in hosts],
        },
        "versions": {
            "python": platform.python_version(),
            "shardtune": VERSION,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": safetensors.__version__,
        },
        "files": files,
        "tensors": entries,
        "tied_weights": tied_weights,
    }


def open_checkpoint(*directories: Path) -> Checkpoint:
    """Read the manifest, which all directories must share.

    Raises:
        UserError: a directory is not a checkpoint, has another format, or is of another checkpoint.
        DamagedCheckpoint: COMPLETE or the manifest is missing, or they do not match.
    """
    first, *others = [_open_one(directory) for directory in directories]
    for other in others:
        if other.digest != first.digest:
            raise UserError(
                f"{other.directories[0]}: is not of the same checkpoint as {directories[0]} "
                "- name the parts of one save"
            )
    return replace(first, directories=directories)


def _open_one(path: Path) -> Checkpoint:
    try:
        complete = (path / "COMPLETE").read_bytes()
        raw = (path / "manifest.json").read_bytes()
    except OSError as error:
        if any(map(os.path.lexists, (path / "COMPLETE", path / "manifest.json"))):
            problem = f"{error.filename}: cannot be read ({error.strerror})"
            raise DamagedCheckpoint(problem) from error
        raise UserError(
            f"{path}: not a complete checkpoint (COMPLETE: {error.strerror}) - use another one"
        ) from error
    digest = xxhash.xxh3_128(raw).hexdigest()
    if complete != f"{digest}\n".encode():
        raise DamagedCheckpoint(f"{path}/manifest.json: does not match the digest in COMPLETE")
    manifest = json.loads(raw)
    if manifest.get("format", FORMAT) != FORMAT:
        raise UserError(
            f"{path}: has format {manifest['format']}, and this version reads format {FORMAT} "
            "- use the version that wrote it"
        )
    return Checkpoint(checkpoint_name(manifest["state"]["step"]), manifest, digest, [path])
