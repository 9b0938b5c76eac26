"""The kernels of a step of small shapes, counted as those of real ones, do not grow."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import REPOSITORY
from helpers.moe_families import FAMILIES, SMALL
from helpers.pretended import needs_compiler
from transformers import AutoConfig

pytestmark = needs_compiler

# Wide enough for tensors without contents, on which nothing is computed.
WIDE = SMALL | {"hidden_size": 2048, "num_hidden_layers": 7, "num_attention_heads": 16}
WIDE |= {"head_dim": 128, "intermediate_size": 5632, "vocab_size": 32000}
WIDE |= {"max_position_embeddings": 4096}
EXPERTS = {"n_routed_experts": 16, "moe_intermediate_size": 1408, "num_experts_per_tok": 4}
MODELS = {"llama": WIDE, "glm4_moe": WIDE | FAMILIES["glm4_moe"] | EXPERTS}
BASE = ["data.max_length=4096", "train.gradient_accumulation_steps=2"]
BASE += ["model.master_dtype=bfloat16", "model.activation_checkpointing=full"]
# Kernels, gigabytes and waits at most, by part. Where a change makes them fewer, these go down.
MOST = {
    ("llama", "optimizer.name=adamw"): {},
    ("glm4_moe", "parallel.expert=8", "optimizer.name=adamw8bit"): {},
}
LINE = re.compile(r"^([a-z ]+): ([\d,]+) kernels, ([\d.]+) GB, ([\d,]+) waits", re.MULTILINE)


def count(family: str, assignments: tuple[str, ...], tmp_path: Path) -> dict[str, list[float]]:
    """Return kernels, gigabytes and waits of each part, as the command prints them."""
    AutoConfig.for_model(family, **MODELS[family]).save_pretrained(tmp_path / family)
    (tmp_path / "config.yaml").touch()
    given = [f"model.path={tmp_path / family}", *BASE, *assignments]
    command = ["-m", "benchmarks", "kernels", f"--config={tmp_path / 'config.yaml'}", *given]
    done = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
    print(done.stdout)
    return {
        part: [float(number.replace(",", "")) for number in numbers]
        for part, *numbers in LINE.findall(done.stdout)
    }


@pytest.mark.parametrize(("family", "assignments"), [(f, a) for f, *a in MOST])
def test_small_shapes_launch_move_and_wait_no_more_than_recorded(
    family: str, assignments: list[str], tmp_path: Path
) -> None:
    counted = count(family, tuple(assignments), tmp_path)
    most = MOST[family, *assignments]
    assert counted.keys() == most.keys()
    for part, numbers in counted.items():
        assert all(n <= limit for n, limit in zip(numbers, most[part], strict=True)), (
            f"{part}: {numbers} kernels, GB and waits, above {most[part]}"
        )
