"""Where records come from, and in which order: files, directories, saved datasets, the hub."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import xxhash

from shardtune.data.record_files import RecordChunk, dataset_chunks, file_chunks, require_codec
from shardtune.errors import UserError, first_few, first_line, missing_directory
from shardtune.hub import datasets_library, hub_problem
from shardtune.paths import KINDS, kind_of, split_path

if TYPE_CHECKING:
    import datasets

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[^:/]+){0,2}")
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?=[-_.])")
_SAVED = ("dataset_dict.json", "state.json")  # these files mark a DatasetDict and a Dataset


@dataclass(frozen=True)
class Source:
    """The files that `spec`, the value of `key`, names: here, or in the cache of the hub."""

    key: str
    spec: str
    files: tuple[Path, ...] = ()  # sorted by name
    ignored: tuple[str, ...] = ()  # other names in the directory; hidden ones if they look alike
    dataset: datasets.Dataset | None = None  # of the hub or one that was saved, in these files
    loss_on: str | None = None  # in place of `data.loss_on`
    max_records: int | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)  # over those of `data`
    columns: Mapping[str, str | None] = field(default_factory=dict)  # `data.columns`

    @property
    def name(self) -> str:
        return f"{self.key}={self.spec}"

    @property
    def is_joined(self) -> bool:
        """Whether several entries of a directory were looked at: the log names them."""
        return self.dataset is None and len(self.files) + len(self.ignored) > 1

    @property
    def n_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def lines(self, n_read: int, with_records: Collection[str]) -> list[str]:
        """Return lines on the files of a directory: those `with_records`, `n_read`, and others."""
        if not self.is_joined:
            return []
        files, n_files = list(self.files), len(self.files)
        if n_read == self.max_records:
            while str(files[-1]) not in with_records:
                files.pop()
        of_all = "" if len(files) == n_files else f" of {n_files}"
        empty = [file.name for file in files if str(file) not in with_records]
        line = f"{self.key}: read {len(files)}{of_all} file{'s' * (n_files > 1)}"
        for what, names in (("no record in", empty), ("ignored", self.ignored)):
            line += f"; {what}: {first_few(names, 10)}" if names else ""
        splits = sorted({found[0] for file in files if (found := _SPLIT.match(file.name))})
        warning = f"WARNING: files of several splits are read as one: {', '.join(splits)}"
        remedy = "move each into a directory of its own, and name those"
        return [line, f"{self.key}: {warning} - {remedy}"] if len(splits) > 1 else [line]

    def digest(self) -> str:
        """Hash every stored byte in order, and the options; a moved copy has the same digest."""
        split = f"{self.dataset.split} {len(self.dataset)}" if self.dataset is not None else ""
        names = [file.name for file in self.files] if self.is_joined else []
        options = f"{split} {self.loss_on} {self.max_records} {names} {self.ignored}"
        options += json.dumps(self.template_options, sort_keys=True)
        total = xxhash.xxh3_128(options.encode())
        for file in self.files:
            try:
                with file.open("rb") as stream:
                    digest = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
            except OSError as error:
                raise UserError(f"{self.name}: {error} - make the file readable") from error
            total.update(f"{kind_of(file.name)} {file.suffix} {digest} ".encode())
        return total.hexdigest()

    def chunks(self) -> Iterator[RecordChunk]:
        """Yield the records in order, at most `max_records`. Blank lines are skipped."""
        left = sys.maxsize if self.max_records is None else self.max_records
        parts = [
            file_chunks(file, self.columns) for file in self.files
        ]  # each opens when it begins
        if self.dataset is not None:
            parts = [dataset_chunks(self.spec, self.dataset, self.n_bytes, self.columns)]
        for chunk in chain.from_iterable(parts):
            yield chunk.first(left)
            left -= len(chunk.numbers)
            if left <= 0:
                return


def find_source(key: str, spec: str) -> Source:
    """Return the source that the value `spec` of the configuration key `key` names.

    Raises UserError where nothing has that name, or it does not hold records.
    """
    name, kinds = f"{key}={spec}", ", ".join(KINDS)
    path, split = split_path(spec)
    if split or any((path / marker).is_file() for marker in _SAVED):
        return _saved_source(key, spec, path, split)
    if path.is_file():
        if not kind_of(path.name):
            suffixes = "".join(path.suffixes) or "nameless"
            raise UserError(f"{name}: a {suffixes} file - use one of {kinds}, or name.jsonl.gz")
        require_codec(name, path)
        return Source(key, spec, files=(path,))
    if path.is_dir():
        files = _record_files(path)
        if not files:
            with_files = (each for each in sorted(path.glob("*/")) if _record_files(each))
            inner = next(with_files, None)
            remedy = f"name {inner}, which has such files" if inner else "put records into it"
            raise UserError(f"{name}: no {kinds} file in this directory - {remedy}")
        for file in files:
            require_codec(name, file)
        others = (entry.name for entry in sorted(path.iterdir()) if entry not in files)
        ignored = (other for other in others if not other.startswith(".") or kind_of(other))
        return Source(key, spec, files, tuple(ignored))
    if kind_of(path.name) or not _HUB_NAME.fullmatch(spec):
        missing = f"no such file or directory{missing_directory(spec)}"
        raise UserError(f"{name}: {missing} - correct the path")
    return _hub_source(key, spec)


def _record_files(folder: Path) -> tuple[Path, ...]:
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    return tuple(entry for entry in entries if kind_of(entry.name) and entry.is_file())


def _saved_source(key: str, spec: str, folder: Path, split: str) -> Source:
    """Return what `save_to_disk` wrote: a Dataset, or the split of a DatasetDict."""
    library = datasets_library()
    try:
        loaded = library.load_from_disk(folder)
    except (OSError, ValueError, LookupError, pyarrow.ArrowException) as error:
        is_saved = any((folder / marker).is_file() for marker in _SAVED)
        remedy = "name a file, a directory of files, or what save_to_disk wrote"
        again = "copy all of it again, or leave out a dataset or split without a record"
        raise UserError(
            f"{key}={spec}: {folder} holds no dataset of save_to_disk that can be read "
            f"({first_line(error)}) - {again if is_saved else remedy}"
        ) from error
    if isinstance(loaded, library.DatasetDict):
        if split not in loaded:
            remedy = f"name one, such as {folder}:{next(iter(loaded))}"
            raise UserError(f"{key}={spec}: a DatasetDict of {', '.join(loaded)} - {remedy}")
        loaded = loaded[split]
    elif split:
        raise UserError(f"{key}={spec}: a Dataset without splits - name {folder} alone")
    files = tuple(Path(entry["filename"]) for entry in loaded.cache_files)
    return Source(key, spec, files, dataset=loaded)


def _hub_source(key: str, spec: str) -> Source:
    dataset_name, config, split = (*spec.split(":"), "", "")[:3]
    unreachable = hub_problem()
    library = datasets_library()
    try:
        dataset = library.load_dataset(dataset_name, config or None, split=split or "train")
    except (OSError, ValueError, library.exceptions.DatasetsError, RuntimeError) as error:
        reason = f"the hub cannot be reached: {unreachable}" if unreachable else first_line(error)
        raise UserError(
            f"{key}={spec}: neither a file or directory here nor a dataset of the hub that can be "
            f"opened ({reason}) - correct the name, or connect to the hub"
        ) from error
    files = tuple(Path(entry["filename"]) for entry in dataset.cache_files)
    return Source(key, spec, files, dataset=dataset)


def read_records(sets: Mapping[str, Sequence[Source]]) -> Iterator[RecordChunk]:
    """Yield the records of every set, numbered through its sources."""
    for set_name, sources in sets.items():
        first_record = 0
        for i, source in enumerate(sources):
            own: dict[str, Any] = {"loss_on": source.loss_on}
            own["template_options"] = source.template_options
            for chunk in source.chunks():
                yield replace(chunk, set_name=set_name, source=i, first_record=first_record, **own)
                first_record += len(chunk.numbers)
