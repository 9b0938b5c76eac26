"""The files of an exported model and what each tensor in them is made of."""

import functools
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    dot_natural_key,
    revert_weight_conversion,
)

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.assets import (
    LISTING,
    SOURCE,
    Entries,
    listing_json,
    model_assets,
    read_listing,
    with_dtype,
    without_announcements,
)
from shardtune.checkpoint.safetensors_writer import write_safetensors
from shardtune.checkpoint.train_state import MODEL, model_kinds
from shardtune.distributed.tensors import DTYPES, DTYPES_IN_SAFETENSORS
from shardtune.errors import RunFailed, UserError
from shardtune.hub import read_config_json
from shardtune.model.source.load_weights import open_tensors, renamed, rows_of_tokens
from shardtune.model.source.quantised import Sliceable, quantisation_in
from shardtune.model.source.text_model import build_with_towers, drop_towers
from shardtune.model.source.weight_files import index_of_weights, list_tensors
from shardtune.new_tokens import PIECES, NewTokens, WithNewRows

_FILE_BYTES = 5_000_000_000
_COMPARED_ROWS = 4096

Kind = tuple[torch.dtype, list[int]]


@dataclass(frozen=True)
class Unit:
    """Tensors that are converted together; mostly one, or the experts of a layer.

    `stored` are their names in a checkpoint; none for a tensor that is copied from the source.
    `converted` has, for each exported name, the one that transformers' conversion gives.
    """

    stored: list[str]
    exported: dict[str, Kind]
    converted: dict[str, str]

    @property
    def bytes(self) -> int:
        kinds = self.exported.values()
        return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in kinds)


class Export(ABC):
    """The files of an export and what each holds, the same on every rank."""

    remark, library = "", "transformers"
    _dtype: str
    _assets: dict[str, bytes]  # the other files
    _files: dict[str, list[Unit]]

    @abstractmethod
    def _convert(self, unit: Unit, read: Callable[[str], torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the exported tensors of a unit from the stored tensors that `read` returns."""

    @property
    def stored(self) -> list[str]:
        """The stored tensors in the order in which all files take them."""
        return [name for unit in self._units for name in unit.stored]

    @property
    def bytes(self) -> int:
        return sum(unit.bytes for unit in self._units)

    @property
    def _units(self) -> list[Unit]:
        return [*chain(*self._files.values())]

    def write_files(
        self, out: Path, read: Callable[[str], torch.Tensor], share: slice = slice(None)
    ) -> Entries:
        entries = {}
        for file_name, units in list(self._files.items())[share]:
            layout = {name: kind for unit in units for name, kind in unit.exported.items()}
            exported = (tensor for unit in units for tensor in self._convert(unit, read))
            written, _ = write_safetensors(out / file_name, layout, exported, {"format": "pt"})
            entries[file_name] = written.entry
        return entries

    def write_rest(
        self,
        out: Path,
        entries: Entries,
        about: Mapping[str, Any],
        card: Callable[[int, str], str],
    ) -> None:
        """Write everything but the weights, once all weights are written.

        `about` says in export.json where the weights are from. `card` returns README.md for a step
        and for the library that opens its model.
        """
        entries = dict(entries)
        files = self._assets | {"README.md": card(about["step"], self.library).encode()}
        if len(self._files) > 1:
            places = {
                name: file_name
                for file_name, units in self._files.items()
                for unit in units
                for name in unit.exported
            }
            total = {"total_size": self.bytes}
            index = json.dumps({"metadata": total, "weight_map": places}, indent=2)
            files["model.safetensors.index.json"] = index.encode()
        for name, content in files.items():
            entries[name] = durable_fs.write_file(out / name, [memoryview(content)]).entry
        files_in_order = dict(sorted(entries.items()))
        summary = listing_json({**about, **self._summary, "files": files_in_order})
        durable_fs.write_file(out / LISTING, [memoryview(summary)])
        durable_fs.sync_directory(out)

    @property
    def _summary(self) -> dict[str, Any]:
        return {"dtype": self._dtype, "tensors": sum(len(unit.exported) for unit in self._units)}

    def is_in(self, out: Path, about: Mapping[str, Any]) -> bool:
        expected = {**about, **self._summary}
        return (read_listing(out) or {}).items() >= expected.items()


class WholeModel(Export):
    """A whole model of trained tensors.

    `stored` has dtype and shape of each stored tensor, `tied` the stored name of each weight that
    is not stored itself. `folder` is the source's, for the tensors that training does not load;
    where it lacks them, they are left out. `remark` says which these are.

    Raises:
        UserError: transformers does not know the configuration, or the source's names are not those
            of the trained tensors.
    """

    def __init__(
        self,
        stored: Mapping[str, Kind],
        tied: Mapping[str, str],
        dtype: str,
        assets: Mapping[str, bytes],
        folder: Path | None,
    ) -> None:
        self._dtype, self._folder = dtype, folder
        self._assets = {name: content for name, content in assets.items() if name != SOURCE}
        if dtype != "source":
            self._assets["config.json"] = with_dtype(assets["config.json"], dtype)
        self._model = on_meta(self._assets["config.json"])
        self._assets["config.json"] = _without_pieces(self._assets["config.json"])
        self._new_tokens, self._grown = NewTokens.of(self._model.config), list[str]()
        towers = tuple(f"{MODEL}{tower}" for tower in drop_towers(self._model))
        source = json.loads(assets[SOURCE]) if SOURCE in assets else None
        copied = list[Unit]()
        self._source_files = dict[str, list[str]]()
        if source is not None:
            # Older checkpoints have towers, equal to the source's.
            stored = {name: kind for name, kind in stored.items() if not name.startswith(towers)}
            self._grow(source["tensors"])
            units = _units_of_source(source, self._model, stored, tied)
            trained = {name for unit in units for name in unit.exported}
            copied = self._untrained(source, trained)
        else:
            units = _units(self._model, stored)
            if towers and not any(name.startswith(towers) for name in stored):
                names = ", ".join(tower.removeprefix(MODEL)[:-1] for tower in towers)
                self.remark = f"Left out: {names}, which model.init=random does not draw"
        self._files = _into_files([self._with_dtypes(unit, source) for unit in units + copied])

    def _convert(self, unit: Unit, read: Callable[[str], torch.Tensor]) -> Iterator[torch.Tensor]:
        dtypes = [dtype for dtype, _ in unit.exported.values()]
        if unit.stored:
            widest = functools.reduce(torch.promote_types, dtypes)
            tensors = {name.removeprefix("model."): read(name) for name in unit.stored}
            stored = {name: in_dtype(name, tensor, widest) for name, tensor in tensors.items()}
            converted = revert_weight_conversion(self._model, stored)
        else:
            converted = self._read_source(next(iter(unit.exported)))
        for name, dtype in zip(unit.exported, dtypes, strict=True):
            yield in_dtype(name, converted[unit.converted[name]], dtype)

    def _grow(self, tensors: Mapping[str, list[Any]]) -> None:
        """Give the source's embedding and head the rows of new tokens."""
        if self._new_tokens.pieces:
            self._grown = rows_of_tokens(self._model, tensors)
        for name in self._grown:
            shape = tensors[name][1]
            shape[0] = self._new_tokens.vocabulary(shape[0])

    def copies(self) -> Iterator[tuple[str, str]]:
        """Yield the names of each two exported tensors that are the same trained one."""
        for unit in self._units:
            first = dict[str, str]()
            for name, converted in unit.converted.items():
                if name != first.setdefault(converted, name):
                    yield first[converted], name

    def _untrained(self, source: Mapping[str, Any], trained: set[str]) -> list[Unit]:
        """Return the source's other tensors, to be copied; none where its folder lacks them."""
        kinds = {name: kind for name, kind in source["tensors"].items() if name not in trained}
        if not kinds:
            return []
        units = [
            Unit([], {name: (DTYPES_IN_SAFETENSORS[dtype], shape)}, {name: name})
            for name, (dtype, shape, *_) in kinds.items()
        ]
        size = sum(unit.bytes for unit in units) / 1e9
        prefix = os.path.commonpath([name.replace(".", "/") for name in kinds]).replace("/", ".")
        what = (
            f"{len(kinds)} tensors that training does not load "
            f"({prefix or min(kinds)}{'' if prefix in kinds else ' ...'}, {size:.2f} GB)"
        )
        path = source["path"]
        self._source_files = files_with(kinds, self._folder)
        if self._source_files:
            self.remark = f"Copied from {path}: {what}"
            return units
        config, changed = without_announcements(self._assets["config.json"])
        self._assets["config.json"] = config
        announced = f"; config.json now has {', '.join(changed)} = 0" if changed else ""
        self.remark = f"Left out: {what}, which {path} now lacks{announced}"
        return []

    def _read_source(self, name: str) -> dict[str, torch.Tensor]:
        assert self._folder
        paths = [self._folder / file_name for file_name in self._source_files[name]]
        with open_tensors(paths, torch.bfloat16) as tensors:
            read: Any = tensors[name]
            return {
                name: (WithNewRows(read, self._new_tokens) if name in self._grown else read)[...]
            }

    def _with_dtypes(self, unit: Unit, source: Mapping[str, Any] | None) -> Unit:
        exact = self._model._keep_in_fp32_modules_strict or ()
        dtype_of_config = cast(torch.dtype | None, self._model.config.dtype)

        def dtype_of(name: str, own: torch.dtype) -> torch.dtype:
            if self._dtype == "source" and source is not None:
                return DTYPES_IN_SAFETENSORS[source["tensors"][name][0]]
            if not own.is_floating_point or any(part in name for part in exact):
                return own
            if self._dtype == "source":
                return dtype_of_config or torch.float32
            return DTYPES[self._dtype]

        kinds = {
            name: (dtype_of(name, dtype), shape) for name, (dtype, shape) in unit.exported.items()
        }
        wide_first = sorted(kinds, key=lambda name: -kinds[name][0].itemsize)
        return replace(unit, exported={name: kinds[name] for name in wide_first})


def files_with(kinds: Mapping[str, list[Any]], folder: Path | None) -> dict[str, list[str]]:
    """Return the files of each of these tensors in a model's folder; none where it lacks one.

    `kinds` has dtype and shape of each by name. The file may be another one than it was; of a
    quantised tensor there are two, the second one with its scales.
    """
    try:
        found = list_tensors(folder) if folder else {}
    except (OSError, SafetensorError, UserError):
        return {}
    alike = [name for name, kind in kinds.items() if found.get(name, [])[:2] == kind[:2]]
    return {name: found[name][2:] for name in alike} if len(alike) == len(kinds) else {}


def in_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the dtype of an export. Raises RunFailed."""
    exported = tensor.to(dtype)
    if dtype == torch.float16 and (beyond := exported.isinf() & tensor.isfinite()).any():
        largest = tensor[beyond].abs().max().item()
        raise RunFailed(
            f"{name} has a value of {largest:g}, and float16 holds 65504 at most - export from the "
            "checkpoint with shardtune export --dtype bfloat16, or set export.dtype=bfloat16"
        )
    return exported


def require_exportable(assets: Mapping[str, bytes], folder: Path) -> None:
    """Refuse a source whose tensors an export could not have. Raises UserError."""
    model = on_meta(assets["config.json"])
    drop_towers(model)
    tied = model.all_tied_weights_keys
    export = WholeModel(model_kinds(model), tied, "source", assets, None)
    source = json.loads(assets[SOURCE])
    for names in export.copies():
        files = files_with({name: source["tensors"][name] for name in names}, folder)
        paths = [folder / file for file, *_ in files.values()]
        with open_tensors(paths, torch.bfloat16) as tensors:
            if not _are_equal(*(tensors[name] for name in names)):
                raise UserError(
                    f"model.path={source['path']}: its config.json ties {' and '.join(names)}, "
                    "which differ in its files - set tie_word_embeddings to false there, in a copy"
                )


def _are_equal(first: Sliceable, other: Sliceable) -> bool:
    """Whether two tensors of the same shape are equal, read a few rows at a time."""
    starts = range(0, first.get_shape()[0], _COMPARED_ROWS)
    rows = [slice(start, start + _COMPARED_ROWS) for start in starts]
    return all(torch.equal(first[each,], other[each,]) for each in rows)


def with_new_tokens(assets: Mapping[str, bytes], text_config: Any) -> dict[str, bytes]:
    """Return the files of a model whose config.json has a run's new tokens, for `NewTokens.of`."""
    config = json.loads(assets["config.json"])
    text = config.get("text_config") or config
    for section in (text, *([config] if "vocab_size" in config else [])):
        section["vocab_size"] = text_config.vocab_size
    config[PIECES] = getattr(text_config, PIECES)
    return {**assets, "config.json": json.dumps(config, indent=2).encode()}


def _without_pieces(config: bytes) -> bytes:
    """Return an exported config.json: a run that trains that model has new tokens of its own."""
    values = json.loads(config)
    return config if values.pop(PIECES, None) is None else json.dumps(values, indent=2).encode()


def require_index(folder: Path, path: str) -> None:
    """Look for a model's tensors in the index of its files, before these are fetched.

    Quantised sources are skipped, because their index has other names; a single file has no index.
    Raises UserError.
    """
    index, config = index_of_weights(folder), model_assets(folder)["config.json"]
    if index is None or quantisation_in(folder):
        return
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    source = {"path": path, "tensors": {name: [None, None] for name in names}}
    model = on_meta(config)
    drop_towers(model)
    _units_of_source(source, model, model_kinds(model), model.all_tied_weights_keys)


def on_meta(config: bytes) -> PreTrainedModel:
    """Build the model of a config.json without storage, towers included."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config)
        try:
            values = read_config_json(folder)
        except ValueError as error:
            raise UserError(
                f"this transformers does not know the checkpoint's model: {error} "
                "- install the version that the manifest names"
            ) from error
    with torch.device("meta"):
        return build_with_towers(values)


def used_conversions(model: PreTrainedModel, stored: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return the conversions by which transformers loads a model's files.

    `stored` has dtype and shape of each of their tensors. Files of one architecture may have
    stacked experts, transposed or not, or one after the other, and any prefix. Tensors that are not
    loaded do not count.
    """
    tensors, loaded = model.state_dict(), sorted(stored, key=dot_natural_key)
    for _ in range(2):  # the second time, with those that are loaded alone
        conversions = get_model_conversion_mapping(model)
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        rename = renamed(model, conversions)
        found = {name: rename(name) for name in loaded}
        loaded = [name for name, (own, _) in found.items() if own in tensors]
    for name, (own, pattern) in found.items():
        converter = next((each for each in converters if pattern in each.source_patterns), None)
        operations: Sequence[Any] = converter.operations if converter else ()
        for operation in operations:
            # It compares a tensor with the model's, so that it would leave it as the model has it.
            if getattr(operation, "check_dims", False):
                operation.check_dims = list(tensors[own].shape) == stored[name][1]
    return [conversion for conversion in conversions if conversion.was_used()]


def _units(model: PreTrainedModel, stored: Mapping[str, Kind]) -> list[Unit]:
    """Group the stored tensors: each by itself where that converts alone, else by module."""
    ignored = model._keys_to_ignore_on_save or ()
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (dtype, shape) in stored.items()
        if name.removeprefix(MODEL) not in ignored
    }

    def unit(names: Sequence[str]) -> Unit:
        own = {name.removeprefix(MODEL): tensors[name] for name in names}
        converted = revert_weight_conversion(model, own)
        kinds = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in converted.items()}
        return Unit(list(names), kinds, {name: name for name in kinds})

    together = unit(list(tensors)).exported
    units, by_module = [], dict[str, list[str]]()
    for name in tensors:
        alone = unit([name])
        if alone.exported.items() <= together.items():
            units.append(alone)
        else:
            by_module.setdefault(name.rpartition(".")[0].rpartition(".")[0], []).append(name)
    return units + [unit(names) for names in by_module.values()]


def _units_of_source(
    source: Mapping[str, Any],
    model: PreTrainedModel,
    stored: Mapping[str, Kind],
    tied: Mapping[str, str],
) -> list[Unit]:
    """Group the stored tensors, and give each the names that the source has for it.

    Tied weights may have several. Some sources leave out the prefix of the model without its head.
    Raises UserError.
    """
    tensors, prefix = source["tensors"], model.base_model_prefix
    # Where transformers keeps them for saving a model that it has loaded.
    cast(Any, model)._weight_conversions = used_conversions(model, tensors)
    units, aliases = _units(model, stored), dict[str, list[str]]()
    for name, kept in tied.items():
        own = revert_weight_conversion(model, {name: torch.empty(0)})
        aliases.setdefault(MODEL + kept, []).extend(own)
    named, lacking = [], list[str]()
    for unit in units:
        names = dict[str, str]()
        for converted, (_, shape) in unit.exported.items():
            found = [
                next(
                    (
                        n
                        for n in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}")
                        if n in tensors and tensors[n][1] in (shape, None)
                    ),
                    None,
                )
                for name in (converted, *aliases.get("".join(unit.stored), ()))
            ]
            if not any(found):
                lacking.append(f"{converted} of shape {shape}")
            names |= {name: converted for name in found if name}
        kinds = {name: unit.exported[converted] for name, converted in names.items()}
        named.append(replace(unit, exported=kinds, converted=names))
    unknown = sorted({each[0] for each in tensors.values()} - {None, *DTYPES_IN_SAFETENSORS})
    problems = [
        f"model.path={source['path']}: its files have {problem}"
        for problem in (
            lacking
            and f"no {min(lacking)} ({len(lacking)} tensors in all), nor any other name by which "
            "transformers finds it - name a model whose files fit its config.json",
            unknown
            and f"tensors of dtype {unknown[0]}, which training does not read - name a "
            "copy in bfloat16",
        )
        if problem
    ]
    if problems:
        raise UserError(*problems)
    return named


def _into_files(units: list[Unit]) -> dict[str, list[Unit]]:
    """Divide the units into files of at most _FILE_BYTES, each with its wide dtypes first."""
    files: list[list[Unit]] = [[]]
    for unit in units:
        if files[-1] and sum(other.bytes for other in files[-1]) + unit.bytes > _FILE_BYTES:
            files.append([])
        files[-1].append(unit)

    def width(unit: Unit) -> int:
        return -max(dtype.itemsize for dtype, _ in unit.exported.values())

    count = len(files)
    parts = [f"-{number:05d}-of-{count:05d}" if count > 1 else "" for number in range(1, count + 1)]
    return {
        f"model{part}.safetensors": sorted(file_units, key=width)
        for part, file_units in zip(parts, files, strict=True)
    }
