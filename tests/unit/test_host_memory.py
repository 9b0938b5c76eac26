"""A limit on the processes counts, where it is below the memory of the node."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtune.distributed.host_memory import available_memory

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
