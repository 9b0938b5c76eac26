"""Free memory, and the advice where it does not suffice."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.ranks import config_for

from shardtune.errors import OutOfMemory
from shardtune.training.memory import free_host_bytes, memory_suffices, weights_fit


@pytest.mark.parametrize(
    ("more", "is_saved", "remedy"),
    [
        ([], False, "lower data.max_length"),
        (
            [],
            True,
            "use more GPUs or nodes, or start anew with another run.dir and a lower "
            "data.max_length",
        ),
        (
            ["parallel.replicate=2"],
            True,
            "lower parallel.replicate, or start anew with another run.dir and a lower "
            "data.max_length",
        ),
    ],
)
def test_memory_that_python_lacks_is_said_too(
    more: list[str], is_saved: bool, remedy: str, models: dict[str, Path], tmp_path: Path
) -> None:
    config = config_for(models["llama"], tmp_path, "model.activation_checkpointing=full", *more)
    said = r"^1 \(train\.micro_batch_size\) row of up to \d+ \(data\.max_length\) tokens "
    said += "does not fit the memory "
    said += rf"\(Unable to allocate .+\) - {re.escape(remedy)}$"
    with pytest.raises(OutOfMemory, match=said), memory_suffices(config, lambda: is_saved):
        np.empty(1 << 60, np.uint8)


def test_an_optimizer_without_memory_is_not_told_to_shorten_rows(
    models: dict[str, Path], tmp_path: Path
) -> None:
    config = config_for(models["llama"], tmp_path)
    said = r"^the model with its gradients and its optimizer's state does not fit the memory "
    said += r"\((?!the|\d+ \().+\) - "
    with (
        pytest.raises(OutOfMemory, match=said),
        memory_suffices(config, lambda: False),
        weights_fit(),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)


GROUPS = {
    "version 2": ("0::/job/step", "", "memory.max", "memory.current", "inactive_file"),
    "version 1": (
        "4:cpu,memory:/job/step",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


@pytest.mark.parametrize(("line", "root", "limit", "used", "cached"), GROUPS.values(), ids=GROUPS)
def test_free_memory_is_that_of_the_container_or_job(
    line: str, root: str, limit: str, used: str, cached: str, tmp_path: Path
) -> None:
    own = tmp_path / "cgroup"
    own.write_text(f"9:pids:/other\n{line}\n", encoding="utf-8")
    groups = {"": "max", "job": "50000000", "job/step": "9223372036854771712"}
    for name, bound in groups.items():
        folder = tmp_path / "groups" / root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text(f"{bound}\n", encoding="utf-8")
        (folder / used).write_text("30000000\n", encoding="utf-8")
        (folder / "memory.stat").write_text(f"cache 8000000\n{cached} 5000000\n", encoding="utf-8")
    assert free_host_bytes(tmp_path / "groups", own) == 25_000_000
    (tmp_path / "groups" / root / "job" / limit).write_text("20000000\n", encoding="utf-8")
    assert free_host_bytes(tmp_path / "groups", own) == 0
    own.write_text("0::/elsewhere\n", encoding="utf-8")
    assert free_host_bytes(tmp_path / "groups", own) > 50_000_000
