"""A checkpoint's files: their names, what the manifest says of them, and how they are read.

Rank files carry the header by which torch.distributed.checkpoint's HuggingFaceStorageReader finds their place in the
whole tensors, so that they can be read without this program.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import xxhash

from shardtune.checkpoint.safetensors_writer import DTYPES, tensor_bytes
from shardtune.errors import UserError

FORMAT = 3
ASSETS = "huggingface"
_NAME = re.compile(r"checkpoint_(\d{7,})")
_READ_BYTES = 1 << 24


class DamagedCheckpoint(Exception):
    """What is read is not what was saved; the message names file and tensor."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: where it begins and how long it is in each dimension, and where its bytes are."""

    tensor: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    end: int
    xxh3_128: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest COMPLETE vouches for. Its files may lie in several directories, one on each disk."""

    name: str
    manifest: Mapping[str, Any]
    digest: str
    directories: Sequence[Path]
    holders: Mapping[str, Sequence[int]] = field(
        default_factory=dict
    )  # of each file the first ranks of disks with it

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

    @property
    def files(self) -> Mapping[str, Mapping[str, Any]]:
        """Size, digest, rank and node of each file, by its name."""
        return cast(Mapping[str, Mapping[str, Any]], self.manifest["files"])

    @cached_property
    def chunks(self) -> dict[str, list[Chunk]]:
        """The boxes of each tensor."""
        return {
            name: [
                Chunk(
                    name,
                    tuple(c["offsets"]),
                    tuple(c["sizes"]),
                    c["file"],
                    c["begin"],
                    c["end"],
                    c["xxh3_128"],
                )
                for c in tensor["chunks"]
            ]
            for name, tensor in self.manifest["tensors"].items()
        }

    @cached_property
    def _chunks_by_file(self) -> dict[str, list[Chunk]]:
        found: dict[str, list[Chunk]] = {}
        for chunk in sorted(
            chain.from_iterable(self.chunks.values()), key=lambda chunk: chunk.begin
        ):
            found.setdefault(chunk.file, []).append(chunk)
        return found

    def chunks_in(self, file: str) -> list[Chunk]:
        """The chunks of one file, in its order."""
        return self._chunks_by_file.get(file, [])

    def find(self, file: str) -> Path | None:
        """The path of a file in the first directory that has it."""
        return next(iter(self.find_all(file)), None)

    def find_all(self, file: str) -> list[Path]:
        """Its path in each directory that has it: nodes with disks of their own have copies of what is not a rank's."""
        return [path for directory in self.directories if (path := directory / file).is_file()]

    def why_missing(self, file: str) -> str:
        """Where a file was written, and where it is not."""
        places = ", ".join(map(str, self.directories))
        entry = self.files[file]
        return f"{file}, written on node {entry['node']} ({entry['host']}), is missing in {places}"


def checkpoint_name(step: int) -> str:
    return f"checkpoint_{step:07d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1])


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def find_checkpoints(directory: Path) -> list[Path]:
    """What has the name of a checkpoint in `directory`, newest first, intact or not."""
    if not directory.is_dir():
        return []
    named = [
        (int(match[1]), entry)
        for entry in directory.iterdir()
        if (match := _NAME.fullmatch(entry.name))
    ]
    return [entry for _, entry in sorted(named, reverse=True)]


def find_committed(directory: Path) -> list[Path]:
    """The checkpoints in `directory` that have their COMPLETE, newest first."""
    return [path for path in find_checkpoints(directory) if (path / "COMPLETE").is_file()]


def open_checkpoint(*directories: Path) -> Checkpoint:
    """Read the manifest, which all directories must share.

    Raises:
        UserError: it is none; or another version wrote it; or the directories are of different checkpoints.
        DamagedCheckpoint: COMPLETE or the manifest is missing, or does not fit the other.
    """
    opened = [_open_one(directory) for directory in directories]
    for directory, other in zip(directories, opened, strict=True):
        if other.digest != opened[0].digest:
            raise UserError(
                f"{directory}: is not of the same checkpoint as {directories[0]} - name the parts of one save"
            )
    return Checkpoint(opened[0].name, opened[0].manifest, opened[0].digest, directories)


def _open_one(path: Path) -> Checkpoint:
    try:
        complete = (path / "COMPLETE").read_bytes()
    except OSError as error:
        if os.path.lexists(path / "manifest.json"):
            raise DamagedCheckpoint(
                f"{path / 'COMPLETE'}: cannot be read ({error.strerror})"
            ) from error
        raise UserError(
            f"{path}: not a complete checkpoint (COMPLETE: {error.strerror}) - use another one"
        ) from error
    try:
        raw = (path / "manifest.json").read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(
            f"{path / 'manifest.json'}: cannot be read ({error.strerror})"
        ) from error
    digest = xxhash.xxh3_128(raw).hexdigest()
    if complete != f"{digest}\n".encode():
        raise DamagedCheckpoint(f"{path / 'manifest.json'}: is not what COMPLETE vouches for")
    manifest = json.loads(raw)
    if manifest["format"] != FORMAT:
        raise UserError(
            f"{path}: has format {manifest['format']} and this version reads {FORMAT} - use the version that wrote it"
        )
    return Checkpoint(checkpoint_name(manifest["state"]["step"]), manifest, digest, [path])


def check_file(checkpoint: Checkpoint, name: str, path: Path, progress: Any = None) -> str | None:
    """Read a file once; what is wrong with it, or None. `progress`, where given, is called with the bytes read."""
    expected = checkpoint.files[name]
    whole, damaged, size = xxhash.xxh3_128(), [], 0
    buffer = memoryview(bytearray(_READ_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            for begin, end, chunk in _sections(checkpoint.chunks_in(name), int(expected["bytes"])):
                part, left = xxhash.xxh3_128(), end - begin
                while left and (count := file.readinto(buffer[:left])):
                    whole.update(buffer[:count])
                    part.update(buffer[:count])
                    left -= count
                    size += count
                    if progress:
                        progress(count)
                if chunk and part.hexdigest() != chunk.xxh3_128:
                    damaged.append(chunk.tensor)
            size += len(file.read(1))
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    if size == expected["bytes"] and whole.hexdigest() == expected["xxh3_128"]:
        return None
    of_tensor = f", first in tensor {damaged[0]}" if damaged else ""
    length = "" if size == expected["bytes"] else f" (its length is not {expected['bytes']})"
    return f"{path}: its bytes are not those that were saved{length}{of_tensor}"


def _sections(chunks: list[Chunk], size: int) -> Iterable[tuple[int, int, Chunk | None]]:
    """The file from its beginning to its end, cut at its chunks."""
    position = 0
    for chunk in chunks:
        if position < chunk.begin:
            yield position, chunk.begin, None
        yield chunk.begin, chunk.end, chunk
        position = chunk.end
    if position < size:
        yield position, size, None


def check_files(
    checkpoint: Checkpoint, names: Sequence[str], threads: int, progress: Any = None
) -> dict[str, str | None]:
    """What is wrong with any copy of each of these files, or None, as many at a time as there are threads.

    Raises:
        KeyError: a name that the manifest does not know.
    """

    def check(name: str) -> str | None:
        paths = checkpoint.find_all(name)
        verdicts = (check_file(checkpoint, name, path, progress) for path in paths)
        return next(filter(None, verdicts), None) if paths else checkpoint.why_missing(name)

    with ThreadPoolExecutor(max(1, threads)) as pool:
        return dict(zip(names, pool.map(check, names), strict=True))


def read_tensor(
    checkpoint: Checkpoint, name: str, read: Callable[[Checkpoint, Chunk], torch.Tensor]
) -> torch.Tensor:
    """A whole tensor, put together of chunks that `read` gives.

    Raises:
        DamagedCheckpoint: a chunk is not what was saved.
    """
    entry, whole = checkpoint.manifest["tensors"][name], None
    for chunk in checkpoint.chunks[name]:
        part = read(checkpoint, chunk)
        if xxhash.xxh3_128(tensor_bytes(part)).hexdigest() != chunk.xxh3_128:
            raise DamagedCheckpoint(
                f"{chunk.file} of {checkpoint.name}: tensor {name} is not what was saved"
            )
        if list(chunk.sizes) == entry["shape"]:
            return part
        if whole is None:
            whole = torch.empty(entry["shape"], dtype=part.dtype)
        box = [
            slice(start, start + length)
            for start, length in zip(chunk.offsets, chunk.sizes, strict=True)
        ]
        whole[tuple(box)] = part
    return torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]]) if whole is None else whole


def read_chunk(
    checkpoint: Checkpoint, chunk: Chunk, box: Sequence[slice] | None = None
) -> torch.Tensor:
    """One chunk, or a box within it, from the first directory that has its file.

    It is read whole and compared with its digest: what was intact when it was checked need not be so when it is read.

    Raises:
        OSError: it cannot be read; FileNotFoundError: no directory has it.
        DamagedCheckpoint: it is not what was saved.
    """
    path = checkpoint.find(chunk.file)
    if path is None:
        raise FileNotFoundError(
            f"{chunk.file} is in none of {', '.join(map(str, checkpoint.directories))}"
        )
    content = torch.empty(chunk.end - chunk.begin, dtype=torch.uint8)
    left = whole = tensor_bytes(content)
    with path.open(
        "rb", buffering=0
    ) as file:  # not mapped: there, an error of the disk would end the process
        file.seek(chunk.begin)
        while left and (count := file.readinto(left)):
            left = left[count:]
    if left or xxhash.xxh3_128(whole).hexdigest() != chunk.xxh3_128:
        raise DamagedCheckpoint(f"{path}: tensor {chunk.tensor} is not what was saved")
    tensor = content.view(DTYPES[checkpoint.manifest["tensors"][chunk.tensor]["dtype"]]).reshape(
        chunk.sizes
    )
    return tensor if box is None else tensor[tuple(box)]
