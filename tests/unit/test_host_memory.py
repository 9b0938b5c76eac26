"""A limit on the processes counts, where it is below the memory of the node."""

from __future__ import annotations

from pathlib import Path

from shardtune.distributed.host_memory import available_memory


def write_cgroup(folder: Path, limit: str, current: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text("anon 500\ninactive_file 30\nactive_file 7\nslab 9\n")


def test_the_tightest_limit_above_the_process_counts(tmp_path):
    own, cgroups = tmp_path / "cgroup", tmp_path / "fs"
    cgroups.mkdir()  # the root of a machine has no limit
    own.write_text("4:memory:/v1/is/ignored\n0::/job/step/task\n")
    without = available_memory(own, cgroups)
    assert without > 1000
    write_cgroup(cgroups / "job/step/task", "max", 600)
    assert available_memory(own, cgroups) > 1000
    write_cgroup(cgroups / "job/step", "2000", 1400)
    write_cgroup(cgroups / "job", "1000", 600)
    assert available_memory(own, cgroups) == 1000 - 600 + 30 + 7
    write_cgroup(cgroups / "job", "1000", 1200)
    assert available_memory(own, cgroups) == 0
    own.write_text("0::/\n")  # a container sees its own group as the root
    write_cgroup(cgroups, "1000", 600)
    assert available_memory(own, cgroups) == 437
