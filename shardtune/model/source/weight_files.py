"""List the weights in a model's safetensors files, and digest them.

The digest says whether two models are the same. Nothing here imports torch, so that the agents of a
launch can compare their nodes.
"""

import contextlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import xxhash
from safetensors import SafetensorError, safe_open

from shardtune.errors import UserError, first_line

# Above this size, digests of models and of data read only blocks at even distances.
WHOLE_BYTES = 4 << 30
_SAMPLED_BYTES = 1 << 30  # the sum of these blocks, about
_BLOCK_BYTES = 1 << 15
_PIECE_BYTES = 8 << 20  # read at a time
_READERS = 8  # threads
_HEADER_BYTES = 100_000_000  # at most, as safetensors has it
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_POINTER = b"version https://git-lfs"
# Endings of the names under which files hold the values and the scales of a quantised tensor.
_QUANTISED = (("", "_scale_inv"), ("weight", "weight_scale"), ("_blocks", "_scales"))
# Engines need these, which also quantise activations, or keys and values.
_OTHER_SCALES = ("activation_scale", "input_scale", "k_proj.k_scale", "v_proj.v_scale")


def index_of_weights(folder: Path) -> Path | None:
    """Return the index of a model's files; None: the single file, which goes before an index.

    It is transformers' order. Raises UserError.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if own := values.get("transformers_weights"):
            raise UserError(
                f"{folder}/config.json: transformers_weights={own} names other files than "
                f"{SINGLE} and {INDEX} - rename them in a copy, and delete that key"
            )
    has_index = (folder / INDEX).is_file() and not (folder / SINGLE).is_file()
    return folder / INDEX if has_index else None


def files_of_weights(folder: Path) -> list[str]:
    """Return the names of a model's files of weights. Raises UserError."""
    if (index := index_of_weights(folder)) is None:
        return [SINGLE]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index}: not a readable index of weights ({describe(error)}) - fetch the model again"
        ) from error


def weight_problems(folder: Path) -> list[str]:
    """Return which of a model's files of weights are missing or damaged. Raises UserError."""
    problems = []
    if (folder / ADAPTER_CONFIG).is_file():
        problems.append(
            f"{folder / ADAPTER_CONFIG}: an adapter lies beside the weights, which transformers "
            "would change by it - merge it first, or move it elsewhere"
        )
    for file in (folder / name for name in files_of_weights(folder)):
        try:
            with safe_open(file, framework="np"):  # compares the file's size with its header
                pass
        except FileNotFoundError:
            problems.append(
                f"{file}: this file of weights is missing - fetch the model again, convert it to "
                "safetensors, or start from model.init=random"
            )
        except (OSError, SafetensorError) as error:
            what = f"truncated or damaged ({describe(error)}) - fetch the model again"
            if _is_pointer(file):
                what = "a pointer of Git LFS, not the weights - run git lfs pull there"
            problems.append(f"{file}: {what}")
    return problems


def _is_pointer(file: Path) -> bool:
    with contextlib.suppress(OSError), file.open("rb") as stream:
        return stream.read(len(_POINTER)) == _POINTER
    return False


def list_tensors(folder: Path) -> dict[str, list[Any]]:
    """Return dtype (as safetensors names it), shape and file of each tensor of a model, by name.

    A quantised tensor is listed as it is read, in bfloat16; the file of its scales comes last. Only
    the headers are read.
    """
    stored = list_stored(folder)
    plain, quantised = split_quantised(stored)
    tensors = {name: stored[name] for name in plain}
    for name, (values, scales) in quantised.items():
        _, shape, file_name = stored[values]
        shape = dequantised_shape(shape) if values != name else shape
        tensors[name] = ["BF16", shape, file_name, stored[scales][2]]
    return dict(sorted(tensors.items()))


def list_stored(folder: Path) -> dict[str, list[Any]]:
    """Return dtype, shape and file of each tensor in a model's files, by its name there."""
    stored: dict[str, list[Any]] = {}
    for file_name in files_of_weights(folder):
        with safe_open(folder / file_name, framework="np") as file:
            for name in sorted(file.keys()):
                tensor = file.get_slice(name)
                stored[name] = [tensor.get_dtype(), tensor.get_shape(), file_name]
    return stored


def split_quantised(stored: Collection[str]) -> tuple[list[str], dict[str, tuple[str, str]]]:
    """Return the names of plain tensors, and of each quantised tensor its values and scales."""
    quantised = {
        values.removesuffix("_blocks"): (values, scales)
        for scales in stored
        for values_end, scales_end in _QUANTISED
        if scales.endswith(scales_end)
        and (values := scales.removesuffix(scales_end) + values_end) in stored
    }
    parts = {part for pair in quantised.values() for part in pair}
    parts |= {name for name in stored if quantised and name.endswith(_OTHER_SCALES)}
    return [name for name in stored if name not in parts], quantised


def dequantised_shape(shape: Sequence[int]) -> list[int]:
    """Return the shape of an MXFP4 tensor: inputs before outputs, and two values in a byte."""
    experts, outputs, groups, group_bytes = shape
    return [experts, 2 * groups * group_bytes, outputs]


def stored_bytes(folder: Path) -> int:
    """Return the size of a model's files, else the size in its index, else 0."""
    try:
        return sum((folder / name).stat().st_size for name in files_of_weights(folder))
    except OSError:
        pass
    try:
        return int(json.loads((folder / INDEX).read_bytes())["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def stored_tensors(file: IO[bytes]) -> Iterator[tuple[str, str, list[int], int, int]]:
    """Yield name, dtype, shape, first byte and size of each tensor in a safetensors file.

    https://github.com/huggingface/safetensors#format

    Raises:
        OSError, ValueError: it cannot be read, or is no such file.
    """
    header_bytes = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    try:
        header = json.loads(os.pread(file.fileno(), min(header_bytes, _HEADER_BYTES), 8))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            yield name, entry["dtype"], entry["shape"], 8 + header_bytes + begin, end - begin
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file.name}: no header of tensors ({describe(error)})") from error


def weights_digest(folder: Path) -> str:
    """Digest a model's weights as `tensors_digest` does. Raises OSError, ValueError, UserError."""
    return tensors_digest(folder / name for name in files_of_weights(folder))


def tensors_digest(paths: Iterable[Path], all_bytes: int | None = None) -> str:
    """Digest the tensors in some files by name, dtype, shape and content.

    The same tensors in other files have the same digest. In a model over WHOLE_BYTES only blocks of
    each tensor count, which its size chooses. `all_bytes`: the model's size, if files are left out.

    Raises:
        OSError, ValueError: a file cannot be read, or is not a safetensors file.
    """
    with ExitStack() as opened, ThreadPoolExecutor(_READERS) as threads:
        files = [opened.enter_context(path.open("rb", buffering=0)) for path in paths]
        tensors = [(*tensor, file.fileno()) for file in files for tensor in stored_tensors(file)]
        tensors.sort(key=lambda tensor: tensor[0])
        total = sum(size for *_, size, _ in tensors) if all_bytes is None else all_bytes

        def digest_one(tensor: tuple[str, str, list[int], int, int, int]) -> list[Any]:
            *what, begin, size, file = tensor
            blocks = max(2, _SAMPLED_BYTES * size // max(1, total) // _BLOCK_BYTES)
            sample = None if total <= WHOLE_BYTES else (blocks, _BLOCK_BYTES)
            return [*what, content_digest(file, begin, size, sample)]

        digests = list(threads.map(digest_one, tensors))
    return xxhash.xxh3_128(json.dumps(digests).encode()).hexdigest()


def content_digest(file: int, begin: int, size: int, sample: tuple[int, int] | None) -> str:
    """Hash a part of an open file. `sample`: the most blocks to read of it, and a block's bytes.

    Blocks lie at even distances, from the first to the last byte.
    """
    blocks, block_bytes = sample or (0, 0)
    pieces = [(at, min(_PIECE_BYTES, size - at)) for at in range(0, size, _PIECE_BYTES)]
    if sample and size > blocks * block_bytes:
        ends = range(blocks)
        pieces = [((size - block_bytes) * i // (blocks - 1), block_bytes) for i in ends]
    hasher = xxhash.xxh3_128()
    for at, count in pieces:
        hasher.update(os.pread(file, count, begin + at))
    return hasher.hexdigest()


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
