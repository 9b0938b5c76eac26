"""The memory that processes may take, and the advice where it does not suffice."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import config_for

from shardtune.distributed.host_memory import available_memory
from shardtune.distributed.layout import Layout
from shardtune.errors import OutOfMemory
from shardtune.training.out_of_memory import step_fits, weights_fit


def test_an_optimizer_without_memory_is_not_told_to_shorten_rows(models, tmp_path):
    said = r"^the model with its gradients and its optimizer's state does not fit the memory "
    said += r"\((?!the|\d+ \().+\) - share it"
    layout = Layout.of(config_for(models["llama"], tmp_path))
    with pytest.raises(OutOfMemory, match=said), step_fits(layout), weights_fit(layout):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_advice_on_memory_names_only_keys_that_are_not_set_yet(models, tmp_path):
    def advice(fits: Any, *overrides: str) -> str:
        with (
            pytest.raises(OutOfMemory) as raised,
            fits(Layout.of(config_for(models["llama"], tmp_path, *overrides))),
        ):
            torch.empty(1 << 60, dtype=torch.uint8)
        return str(raised.value)

    state = ("model.master_dtype=bfloat16", "optimizer.name=adamw8bit", "lora.rank=16")
    given = advice(weights_fit)
    assert all(setting in given for setting in state)
    given = advice(weights_fit, "lora.rank=4")
    assert not any(setting in given for setting in state)
    spread = ("parallel.expert=2", "model.activation_checkpointing=full")
    given = advice(step_fits, *spread)
    assert "parallel.expert" not in given and "activation_checkpointing" not in given
    assert "- use more GPUs, or start anew" in given
    assert "lower train.micro_batch_size" in advice(step_fits, "train.micro_batch_size=2")


V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
V2 = "memory.max", "memory.current", ""


def write_cgroup(
    folder: Path, limit: int, current: int, names: tuple[str, str, str], most: str = ""
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{most or limit}\n")
    (folder / names[1]).write_text(f"{current}\n")
    cached = f"{names[2]}inactive_file 30\n{names[2]}active_file 7\n"
    (folder / "memory.stat").write_text(f"anon 500\n{cached}slab 9\n")


@pytest.mark.parametrize(
    ("line", "root", "names", "no_limit"),
    [("0::", "", V2, "max"), ("4:memory:", "memory", V1, "9223372036854771712")],
    ids=("v2", "v1"),
)
def test_the_tightest_limit_above_the_process_counts(tmp_path, line, root, names, no_limit):
    own, cgroups = tmp_path / "cgroup", tmp_path / "fs"
    top = cgroups / root
    top.mkdir(parents=True)  # the root of a machine has no limit
    own.write_text(f"3:cpu:/elsewhere\n{line}/job/step/task\n")
    without = available_memory(own, cgroups)
    assert without > 1000
    write_cgroup(top / "job/step/task", 0, 600, names, no_limit)
    assert available_memory(own, cgroups) > 1000
    write_cgroup(top / "job/step", 2000, 1400, names)
    write_cgroup(top / "job", 1000, 600, names)
    assert available_memory(own, cgroups) == 1000 - 600 + 30 + 7
    write_cgroup(top / "job", 1000, 1200, names)
    assert available_memory(own, cgroups) == 0
    own.write_text(f"{line}/docker/of-the-host\n")  # a container sees its own group as the root
    write_cgroup(top, 1000, 600, names)
    assert available_memory(own, cgroups) == 437
