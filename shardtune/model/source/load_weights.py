"""Load a model's files sharded: each rank reads the bytes of its own slices, and no others.

transformers decides which stored tensors make which parameter, and which slices this rank needs;
`StoredTensor` reads the slices. Parameters are read one after the other, so that a rank holds its
share of the model and the pieces of one parameter.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.distributed import DistributedConfig

from shardtune.distributed.tensors import DTYPES_IN_SAFETENSORS, slice_like, to_local
from shardtune.errors import UserError
from shardtune.log import logger
from shardtune.model.parts import FACTORS, ROWS
from shardtune.model.source.quantised import DTYPES_OF_PARTS, Index, Sliceable, box_of, dequantised
from shardtune.model.source.text_model import drop_towers
from shardtune.model.source.weight_files import stored_tensors
from shardtune.new_tokens import NewTokens, WithNewRows
from shardtune.units import duration, gb

_PIECE_BYTES = 8 << 20  # one read of a thread
_READERS = 4  # threads per rank
_FIRST_REPORT_S, _REPORT_EVERY_S = 5, 10
_DTYPES = DTYPES_IN_SAFETENSORS | DTYPES_OF_PARTS
Shard = Callable[[PreTrainedModel], None]  # shards a model in place


class StoredTensor:
    """Reads slices of a tensor in a safetensors file, and no other bytes."""

    # It replaces a slice of `safe_open`, which maps the file: a rank that needs columns would read
    # whole rows, and an error of the disk would kill the process.

    def __init__(
        self, file: IO[bytes], begin: int, dtype: str, shape: Sequence[int], reader: _Reader
    ) -> None:
        self._file, self._begin, self._dtype, self._shape = file, begin, dtype, shape
        self._reader = reader

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: Index) -> torch.Tensor:
        """Read a box of the tensor. Raises OSError."""
        box = box_of(index, self._shape)
        content = torch.empty([len(edge) for edge in box], dtype=_DTYPES[self._dtype])
        if content.numel():
            starts, size = self._runs(box, content.itemsize)
            target = content.reshape(-1).view(torch.uint8).numpy().data
            self._reader.read(self._file, starts, size, target)
        return content

    def _runs(self, box: Sequence[range], itemsize: int) -> tuple[list[int], int]:
        """Return where in the file each run of adjacent bytes of a box begins, and their size."""
        starts, run, stride, is_adjacent = np.array([self._begin]), itemsize, itemsize, True
        for size, edge in zip(reversed(self._shape), reversed(box), strict=True):
            if is_adjacent:  # all inner dimensions are whole
                starts += edge.start * stride
                run, is_adjacent = len(edge) * stride, len(edge) == size
            else:
                starts = np.add.outer(np.array(edge) * stride, starts).ravel()
            stride *= size
        return starts.tolist(), run


@contextmanager
def open_tensors(
    paths: Sequence[str | Path], dtype: torch.dtype, share: float = 1.0
) -> Iterator[dict[str, Sliceable]]:
    """Yield a model's tensors by name, quantised ones in `dtype`. `share`: this rank's part."""
    with ExitStack() as opened:
        reader = _Reader(opened.enter_context(ThreadPoolExecutor(_READERS)), share)
        tensors: dict[str, StoredTensor] = {}
        for path in paths:
            file = opened.enter_context(Path(path).open("rb", buffering=0))
            for name, stored_dtype, shape, begin, size in stored_tensors(file):
                reader.total_bytes += size
                tensors[name] = StoredTensor(file, begin, stored_dtype, shape, reader)
        yield dequantised(tensors, Path(paths[0]).parent, dtype)
        reader.report_end()


class _Reader:
    """Reads with several threads, and logs the progress of this rank as that of all ranks."""

    def __init__(self, threads: ThreadPoolExecutor, share: float) -> None:
        self.total_bytes = 0  # the size of all files
        self._threads, self._share, self._read_bytes = threads, share, 0
        self._began, self._reported = time.monotonic(), 0.0

    def read(self, file: IO[bytes], starts: Sequence[int], run: int, target: memoryview) -> None:
        """Fill `target` with the runs of `run` bytes that begin at `starts`. Raises OSError."""
        pieces = [
            (start + first, target[number * run :][first : min(run, first + _PIECE_BYTES)])
            for number, start in enumerate(starts)
            for first in range(0, run, _PIECE_BYTES)
        ]
        at_once = max(1, _PIECE_BYTES // run)
        groups = [pieces[first : first + at_once] for first in range(0, len(pieces), at_once)]
        for _ in self._threads.map(partial(_read_pieces, file), groups):
            pass
        self._read_bytes += len(target)
        self._report()

    def _report(self) -> None:
        now = time.monotonic()
        seconds = now - self._began
        if seconds < _FIRST_REPORT_S or now < self._reported + _REPORT_EVERY_S:
            return
        done = min(1.0, self._read_bytes / max(1.0, self._share * self.total_bytes))
        rate = f"{gb(done * self.total_bytes / seconds, 2)} GB/s"
        total, estimate = f"{gb(self.total_bytes)} GB", seconds / done
        if not self._reported:
            logger.info(f"Reading weights: about {duration(estimate)} for {total}, at {rate}")
        else:
            logger.info(
                f"Reading weights: {gb(done * self.total_bytes)} GB of {total} | {rate} | "
                f"about {duration(estimate - seconds)} left"
            )
        self._reported = now

    def report_end(self) -> None:
        if self._reported:
            seconds = time.monotonic() - self._began
            rate = f"{gb(self.total_bytes / seconds, 2)} GB/s"
            total = gb(self.total_bytes)
            logger.info(f"Read weights: {total} GB in {duration(seconds)}, {rate}")


def _read_pieces(file: IO[bytes], pieces: Sequence[tuple[int, memoryview]]) -> None:
    for start, target in pieces:
        while target:
            count = os.preadv(file.fileno(), [target], start)
            if not count:
                raise OSError(f"{file.name}: ends at byte {start}, before its last tensor")
            start, target = start + count, target[count:]


class SliceConverter(WeightConverter):
    """Converts stored tensors as transformers does, in less memory and for empty slices, too.

    Files hold one tensor per expert. Each rank reads the experts of its slice and stacks them.
    transformers fails if a rank has no experts to stack, and holds every expert three times.
    """

    __slots__ = ()

    def convert(self, layer_name: str, model: Any = None, *more: Any, **options: Any) -> Any:
        target = to_local(model.get_parameter_or_buffer(layer_name))
        if not target.numel():
            self.collected_tensors.clear()
            return {layer_name: torch.empty(target.shape, dtype=target.dtype)}
        operations = [(type(each), getattr(each, "dim", None)) for each in self.operations]
        if operations in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            return {layer_name: self._stack(target.shape)}
        if operations == [(Transpose, None)] and getattr(self.operations[0], "check_dims", False):
            # transformers compares the slice with the whole parameter.
            ((stored, *_),) = self.materialize_tensors().values()
            fits = stored.shape == target.shape
            return {layer_name: stored if fits else stored.transpose(1, 2).contiguous()}
        if not _joins_or_cuts_rows(operations):
            return super().convert(layer_name, model, *more, **options)
        # Some models join the rows of several tensors, such as the convolutions of queries, keys
        # and values. Joined slices are not a slice of the joined tensor: read whole ones, then cut.
        for pattern, reads in self.collected_tensors.items():
            self.collected_tensors[pattern] = cast(Any, [partial(_read_whole, r) for r in reads])
        made = super().convert(layer_name, model, *more, **options)
        return {
            name: slice_like(whole, model.get_parameter_or_buffer(name)).contiguous()
            for name, whole in made.items()
        }

    def _stack(self, shape: torch.Size) -> torch.Tensor:
        """Read one expert after the other into its place in a stack. Raises UserError."""
        stack: torch.Tensor | None = None
        end = 0
        for pattern in self.source_patterns:
            begin, count = end, 0
            for read in self.collected_tensors.pop(pattern, ()):
                part = cast(Callable[[], torch.Tensor | None], read)()
                if part is None:  # an expert of another rank
                    continue
                stack = part.new_empty(shape) if stack is None else stack
                end = end if count else begin + len(part)
                place = stack[count : count + 1, begin:end]
                if place.shape != (1, *part.shape):
                    raise self._misfit(shape)
                place.copy_(part)
                count += 1
            if count != shape[0]:
                raise self._misfit(shape)
        if stack is None or end != shape[1]:
            raise self._misfit(shape)
        return stack

    def _misfit(self, shape: torch.Size) -> UserError:
        return UserError(
            f"the stored experts {', '.join(self.source_patterns)} do not fill a stack of "
            f"{list(shape)} - fetch the model again, or correct its config.json"
        )


def _joins_or_cuts_rows(operations: Sequence[tuple[type, int | None]]) -> bool:
    kinds = {kind for kind, _ in operations}
    return MergeModulelist not in kinds and bool({(Concatenate, 0), (Chunk, 0)} & {*operations})


def _read_whole(read: Any) -> torch.Tensor:
    """Read the whole tensor, where `read`, a function of transformers, would read a slice."""
    within = inspect.getclosurevars(read).nonlocals
    whole: torch.Tensor = within["tensor"][...].to(within["dtype"])
    return whole


def renamed(model: PreTrainedModel, conversions: Sequence[Any]) -> Callable[[str], Any]:
    """Return a function of a stored tensor's name: the model's name, and the pattern it matched."""
    return partial(
        rename_source_key,
        weight_renamings=[each for each in conversions if isinstance(each, WeightRenaming)],
        weight_converters=[each for each in conversions if isinstance(each, WeightConverter)],
        base_model_prefix=model.base_model_prefix,
        meta_state_dict=model.state_dict(),
    )


def rows_of_tokens(model: PreTrainedModel, stored: Iterable[str]) -> list[str]:
    """Return which stored tensors have a row for each token: the embedding, and the head."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    own = {id(p) for end in ends if end is not None for p in end.parameters(recurse=False)}
    every = model.named_parameters(remove_duplicate=False)
    names = {name for name, parameter in every if id(parameter) in own}
    rename = renamed(model, get_model_conversion_mapping(model))
    return [name for name in stored if rename(name)[0] in names]


def load_sharded(
    skeleton: PreTrainedModel,
    path: str,
    device: torch.device,
    shard: Shard,
) -> PreTrainedModel:
    """Load the weights into a model like the skeleton, which is sharded before they are read."""
    # With it, `accelerate launch` lets ranks but the first leave weights on meta, for FSDP1.
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
    # transformers builds on meta, calls `maybe_distribute_model`, and then reads only this rank's
    # slices of all parameters that are DTensors. Its own version of that method unties tied
    # embeddings and supports neither a world of one nor our dtypes: so a subclass replaces it.
    model, info = _sharded_class(skeleton, device, shard).from_pretrained(
        path,
        config=skeleton.config,
        dtype=skeleton.dtype,
        attn_implementation=skeleton.config._attn_implementation,
        distributed_config=DistributedConfig(),  # no parallelism of transformers' own
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    del model.config.distributed_config
    # Free blocks that reading has left in the allocator have other sizes than training asks for.
    torch.cuda.empty_cache()
    _require_all_weights(path, info)
    return cast(PreTrainedModel, model)


def _sharded_class(skeleton: PreTrainedModel, device: torch.device, shard: Shard) -> type[Any]:
    """Return a subclass of the skeleton's class that `from_pretrained` shards before it reads."""
    model_class, names = type(skeleton), sorted(skeleton.state_dict())
    whole = sum(p.numel() for p in skeleton.parameters())

    class Sharded(model_class):  # type: ignore[misc, valid-type]
        __module__ = model_class.__module__

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            _keep_in_float32(self)
            _leave_towers_out(self)

        # The factors of adapters are drawn, so the files lack them.
        _keys_to_ignore_on_load_missing = (
            *(model_class._keys_to_ignore_on_load_missing or ()),
            *(f"{factor}$" for factor in FACTORS),
        )
        # The files have the layers of other stages, too.
        _keys_to_ignore_on_load_unexpected = (
            *(model_class._keys_to_ignore_on_load_unexpected or ()),
            f"^(?:{'|'.join(map(re.escape, names))})$",
            f"{ROWS}$",
        )

        @classmethod
        def is_custom_code(cls) -> bool:
            # The class that FSDP2 makes looks like custom code, whose buffers transformers leaves
            # undefined.
            return model_class.is_custom_code()

        @classmethod
        def prepare_distribute_model(
            cls, distributed_config: Any, device_map: Any = None, **_: Any
        ) -> tuple[Any, Any, None]:
            return distributed_config, device, None

        @classmethod
        def maybe_distribute_model(cls, model: PreTrainedModel, *_: Any) -> PreTrainedModel:
            # transformers ties only after reading. FSDP2 must see tied weights as one parameter.
            model.tie_weights()
            shard(model)
            return model

        @staticmethod
        def _load_pretrained_model(
            model: PreTrainedModel, states: Any, files: Any, load: Any
        ) -> Any:
            _convert_slices(load.weight_mapping)
            share = sum(to_local(p).numel() for p in model.parameters()) / whole
            reading = open_tensors(files, skeleton.dtype, share)
            with _one_parameter_at_a_time(), _training_the_same(model), reading as tensors:
                _add_rows(skeleton, tensors)
                read = model_class._load_pretrained_model(model, tensors, None, load)
            _leave_as_read(model)
            return read

    # transformers finds its conversions by the class's name.
    Sharded.__name__ = Sharded.__qualname__ = model_class.__name__
    return Sharded


def _convert_slices(conversions: Sequence[Any]) -> None:
    for conversion in conversions:
        if type(conversion) is WeightConverter:
            conversion.__class__ = SliceConverter


def _add_rows(skeleton: PreTrainedModel, tensors: dict[str, Sliceable]) -> None:
    """Let the stored embedding and head have rows of new tokens, if there are any."""
    new_tokens = NewTokens.of(skeleton.config)
    for name in rows_of_tokens(skeleton, tensors) if new_tokens.pieces else ():
        tensors[name] = grown = WithNewRows(tensors[name], new_tokens)
        if name.endswith("weight"):  # beside adapters they train as a parameter of their own
            tensors[name.removesuffix("weight") + ROWS] = grown.only_new()


def _leave_towers_out(model: PreTrainedModel) -> None:
    """Drop the towers, which no text reaches, although the files have tensors of them."""
    towers = drop_towers(model)
    if not towers:
        return
    patterns = {f"^{re.escape(tower)}" for tower in towers}
    cast(Any, model)._keys_to_ignore_on_load_unexpected |= patterns
    unread = ", ".join(tower.removesuffix(".") for tower in towers)
    logger.info(f"Not loaded, since no text reaches it: {unread}")


def _leave_as_read(model: PreTrainedModel) -> None:
    """Keep transformers from initialising modules again that the files have whole.

    It leaves their weights alone, but some classes (HY V4) compute initial ones from shards, and
    DTensor has no rule for that.
    """
    for module in model.modules():
        parameters = list(module.parameters())
        is_read = all(getattr(p, "_is_hf_initialized", False) for p in parameters)
        if parameters and is_read and not list(module.buffers()):
            cast(Any, module)._is_hf_initialized = True


def _keep_in_float32(model: PreTrainedModel) -> None:
    """Keep in float32 the tensors that the class names, except trained weights."""
    # Trained weights have the masters' dtype.
    patterns = "|".join(model._keep_in_fp32_modules_strict or ())
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    model._keep_in_fp32_modules_strict = {
        re.escape(name)
        for name in model.state_dict()
        if patterns and name not in trained and re.search(patterns, name)
    }


@contextmanager
def _training_the_same(model: PreTrainedModel) -> Iterator[None]:
    """Let those parameters train that trained before transformers has read new ones."""
    # A file may have a tied weight by either of its names.
    named = model.named_parameters(remove_duplicate=False)
    trained = {name for name, parameter in named if parameter.requires_grad}
    yield
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


@contextmanager
def _one_parameter_at_a_time() -> Iterator[None]:
    """Keep transformers' threads from reading ahead without a bound. `_Reader` has threads."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _require_all_weights(path: str, info: Mapping[str, Any]) -> None:
    """Check the report of `from_pretrained`, and log tensors that were left unread.

    Raises:
        UserError: the files lack tensors of the model, or have them in another shape.
    """
    misshapen = [
        f"{name}, {list(stored)}, not {list(built)}"
        for name, stored, built in info["mismatched_keys"]
    ]
    problems = [
        f"{path}: {problem} {min(names)} ({len(names)} in all) - fetch the model again, or correct "
        "its config.json"
        for problem, names in (
            ("the files lack the model's tensor", info["missing_keys"]),
            ("another shape than the model's has", misshapen),
        )
        if names
    ]
    if problems:
        raise UserError(*problems)
    if unexpected := sorted(info["unexpected_keys"]):
        logger.info(
            f"Not in the model, left unread: {unexpected[0]} ({len(unexpected)} tensors in all)"
        )
