"""Small runs with checkpoints: their inputs, and how two of them are compared."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from helpers.chats import chats, write_jsonl
from helpers.commands import read_metrics
from helpers.ranks import run_script
from shardtune.training.states import reshard

SETTINGS = (
    "model.path=model",
    "model.compute_dtype=float32",
    "data.train=train.jsonl",
    "data.max_length=128",
    "optimizer.lr=1e-3",
)
MEASURED = {
    *("time", "seconds", "data_seconds", "tokens_per_second", "mfu"),
    *("memory_bytes", "reserved_memory_bytes"),
}
# The learning rate of a step then does not depend on how many there are.
CONSTANT = ("scheduler.name=constant", "scheduler.warmup_ratio=0", "train.epochs=9")


def with_dropout(model: Path, copy: Path, dropout: float) -> Path:
    """Copy a model, with that much attention dropout in its configuration."""
    return with_settings(model, copy, attention_dropout=dropout)


def with_settings(model: Path, copy: Path, **settings: Any) -> Path:
    """Copy a model, with other values in its configuration."""
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    (copy / "config.json").write_text(json.dumps(config | settings), encoding="utf-8")
    return copy


def write_inputs(folder: Path, model: Path, dropout: float = 0.0, records: int = 37) -> Path:
    """Write the files of SETTINGS: the model, with that dropout, and chats."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("run: {dir: run}\n", encoding="utf-8")
    with_dropout(model, folder / "model", dropout)
    write_jsonl(folder / "train.jsonl", chats(records))
    return folder


def run_without_room(arguments: list[str]) -> None:
    """On a rank: as if no memory were free."""
    vars(reshard)["_SHARE"] = 0.0
    run_script(arguments)


def run_in_graphs(arguments: list[str]) -> None:
    """On a rank: compiled layers run as they are captured, which spares minutes of a compiler."""
    capture_alone()
    run_script(arguments)


def capture_alone() -> None:
    torch.compile = partial(torch.compile, backend="aot_eager_decomp_partition")


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the steps in `metrics.jsonl` without their speed and memory."""
    return [
        {key: value for key, value in entry.items() if key not in MEASURED}
        for entry in read_metrics(run_dir, "step")
    ]


def flip_bit(file: Path, position: int | None = None, bit: int = 0) -> None:
    """Damage a byte of a file, the one in its middle, or mend it again."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1 << bit
    file.write_bytes(content)


def digests(folder: Path, pattern: str = "*") -> dict[str, str]:
    """Return the digest of every file below a folder, by its path there."""
    return {
        str(path.relative_to(folder)): xxhash.xxh3_128(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob(pattern))
        if path.is_file()
    }


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files of an exported model, or of a checkpoint's ranks."""
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for tensors in files for name, tensor in tensors.items()}


def assert_same_tensors(one: Path, other: Path) -> None:
    ours, theirs = tensors_of(one), tensors_of(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"checkpoint_{step:07d}"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def close_to(steps: list[dict[str, float]]) -> list[object]:
    """Expect the same steps over the same tokens; losses and norms to 1e-5."""
    return [
        step | {key: pytest.approx(step[key], rel=1e-5, abs=1e-5) for key in ("loss", "grad_norm")}
        for step in steps
    ]
