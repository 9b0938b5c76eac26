"""What the preflight makes of the facts of its nodes, here made up: differences that it refuses, and those that it
warns of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.documented import require_documented

from shardtune.cluster import compare
from shardtune.cluster import microbenchmark as ranks
from shardtune.cluster import node_info as facts

FACTS: dict[str, Any] = {
    "versions": {"torch": "2.13.0"},
    "libraries": {"CUDA": "13.0", "NCCL": "2.28.9"},
    "code": {},
    "environment": {"TORCH_DISTRIBUTED_DEBUG": "not DETAIL"},
    "tuning": {},
    "config": {"parallel.replicate": 1, "parallel.expert": 1},
    "data": {},
    "model": {},
    "weights_bytes": 0,
    "remarks": [],
    "processes": 8,
    "run_dir": "runs/config",
    "free_disk_bytes": 1e13,
    "shares_run_dir": True,
    "clock_ahead_s": 0.0,
    "clock_error_s": 0.001,
    "device": "GPU",
    "gpus": [{"name": "H100", "free_bytes": 79e9, "total_bytes": 80e9}] * 8,
    "gpu_users": "",
    "driver": "580.1",
    "shm_bytes": 1e11,
    "nofile": 1 << 20,
    "memlock": -1,
    "has_rdma": True,
}


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({}, ""),
        (
            {"libraries": {"CUDA": "13.0", "NCCL": "2.27.3"}},
            "NCCL is 2.28.9 on node 0 (a) and 2.27.3 on node 1 (b)",
        ),
        (
            {"environment": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}},
            "TORCH_DISTRIBUTED_DEBUG is not DETAIL on node 0 (a) and DETAIL on node 1 (b)",
        ),
        ({"driver": "570.2"}, "the GPU driver is 580.1 on node 0 (a) and 570.2 on node 1 (b)"),
        (
            {"gpus": [{"name": "A100", "free_bytes": 40e9, "total_bytes": 40e9}]},
            "the GPU is H100 on node 0 (a) and A100 on node 1 (b)",
        ),
        ({"device": "CPU", "gpus": [], "driver": ""}, "GPUs on node 0 (a) and CPUs on node 1 (b)"),
        (
            {"processes": 4, "config": {"parallel.replicate": 8, "parallel.expert": 1}},
            "12 (8 + 4 processes on node 0 (a), node 1 (b)), which parallel.replicate=8 does not divide",
        ),
        (
            {"processes": 4, "config": {"parallel.replicate": 2, "parallel.expert": 4}},
            "12 (8 + 4 processes on node 0 (a), node 1 (b)), and parallel.expert=4 does not divide 12 / 2 (parallel.",
        ),
        (
            {"config": {"parallel.replicate": 1, "parallel.expert": 1, "new": None}},
            "new is missing on node 0 (a) and null",
        ),
        ({"clock_ahead_s": -40.0}, "the clock of node 1 (b) is 40.0 s behind that of node 0 (a)"),
    ],
)
def test_facts_that_are_refused(different: dict[str, Any], words: str) -> None:
    facts = [FACTS, FACTS | different]
    if "processes" in different:
        facts[0] = FACTS | {"config": different["config"]}
    names = ["node 0 (a)", "node 1 (b)"]
    problems = compare.problems_of_files(facts, names) + compare.problems_of_machines(facts, names)
    assert [words in problem for problem in problems] == [True] * bool(different)
    for problem in problems:
        require_documented("preflight", f"ERROR: {problem}")


def test_a_run_directory_that_some_nodes_share() -> None:
    names = ["node 0 (a)", "node 1 (b)", "node 2 (c)"]
    (problem,) = compare.problems_of_files([FACTS, FACTS, FACTS | {"shares_run_dir": False}], names)
    assert problem.startswith(
        "run.dir runs/config is one directory on node 0 (a), node 1 (b) and another on node 2 (c)"
    )
    require_documented("preflight", f"ERROR: {problem}")
    alone = FACTS | {"shares_run_dir": False}
    assert not compare.problems_of_files([FACTS, alone, alone], names)  # each has a disk of its own


def test_the_first_differences_are_said_last() -> None:
    code = {f"shardtune/{number:02}.py": "a digest" for number in range(14)}
    problems = compare.problems_of_files(
        [FACTS, FACTS | {"code": code}], ["node 0 (a)", "node 1 (b)"]
    )
    assert problems[0].startswith("4 more differences in code - ") and len(problems) == 11
    require_documented("preflight", f"ERROR: {problems[0]}")


@pytest.mark.parametrize(("key", "kind"), [("data.train", "data"), ("model.path", "model")])
def test_files_of_another_path(key: str, kind: str) -> None:
    """That they differ follows from their path, which alone is said; those of the same path are compared."""

    def node(path: str, digest: str) -> dict[str, Any]:
        data = {f"{other}: a.jsonl": digest for other in ("data.train", "data.eval")}
        config = FACTS["config"] | {"data.train": "x", "model.path": "y", key: path}
        return FACTS | {"data": data, "model": {"config.json": {"told": digest}}, "config": config}

    names = ["node 0 (a)", "node 1 (b)"]
    *others, last = compare.problems_of_files(
        [node("here", "1 byte"), node("there", "2 bytes")], names
    )
    assert last.startswith(
        f"{key} is here on node 0 (a) and there on node 1 (b) - start every node with the same "
    )
    lines = {"data": "data.train: a.jsonl is", "model": "config.json is"}
    expected = ["data.eval: a.jsonl is", *(line for other, line in lines.items() if other != kind)]
    assert sorted(line.partition(" 1 byte on ")[0] for line in others) == sorted(expected)


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({}, ""),
        (
            {"gpus": [FACTS["gpus"][0] | {"free_bytes": 9e9}], "gpu_users": "77, python, 70 GB"},
            "node 1 (b): GPU 0 has only 9.0 of 80.0 GB free, another process holds the rest (processes on its GPUs: 77",
        ),
        (
            {"weights_bytes": 214 * 10**10},
            "has 10000.0 GB free, a checkpoint may need up to 12840 GB",
        ),
        ({"free_disk_bytes": 9e9}, "run.dir runs/config has 9.0 GB free"),
        ({"shm_bytes": 64e6}, "/dev/shm has 64 MB"),
        ({"nofile": 256}, "only 256 open files"),
        ({"memlock": 65536}, "only 65536 bytes may be locked"),
        (
            {"tuning": {"NCCL_ALGO": "Ring"}},
            "NCCL_ALGO is missing on node 0 (a) and Ring on node 1 (b) - most of these",
        ),
        ({"clock_ahead_s": 2.0}, "the clock of node 1 (b) is 2.0 s ahead of that of node 0 (a)"),
        ({"clock_ahead_s": 2.0, "clock_error_s": 1.5}, ""),
    ],
)
def test_facts_that_are_warned_of(different: dict[str, Any], words: str) -> None:
    found = compare.warnings_of([FACTS, FACTS | different], ["node 0 (a)", "node 1 (b)"])
    assert [words in warning for warning in found] == [True] * bool(words)


def test_a_slow_device() -> None:
    figures = [{"flops": [6e14, 6.1e14]}, {"flops": [4.6e14, 5.9e14]}]
    (warning,) = ranks.slow_devices(figures, ["node 0 (a)", "node 1 (b)"])
    assert warning.startswith("node 1 (b): device 0 is slow, its GEMM runs at 460 TFLOP/s")


def test_only_files_that_are_read_are_compared(tmp_path: Path) -> None:
    for name in ("train.jsonl", "NOTES.txt"):
        (tmp_path / name).touch()
    found = vars(facts)["_data"](
        {"data.train": str(tmp_path), "data.eval": str(tmp_path / "train.jsonl")}, []
    )
    assert list(found) == ["data.train: train.jsonl", "data.eval: train.jsonl"]


def test_weights_are_compared_whole_or_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    content = bytearray(40 << 20)

    def told() -> tuple[str, list[str]]:
        remarks: list[str] = []
        file.write_bytes(content)
        return vars(facts)["_model"](tmp_path, remarks)[file.name]["told"], remarks

    before, remarks = told()
    content[len(content) // 2 + (1 << 20)] ^= 1  # between two samples
    assert told()[0] != before and not remarks
    monkeypatch.setattr(facts, "_WHOLE_BYTES", 1 << 20)
    _, remarks = told()
    assert remarks == [
        "the model's weights: over 0 GiB, so samples of each file are compared, and its size"
    ]


def test_data_that_is_too_large_to_read_is_sampled(tmp_path: Path) -> None:
    """The last block of a file is always among the samples."""
    file = tmp_path / "train.jsonl"
    content = bytearray(20 << 20)
    file.write_bytes(content)
    whole, sampled = (facts.digest(file, is_whole) for is_whole in (True, False))
    content[-1] = 1
    file.write_bytes(content)
    assert facts.digest(file, True) != whole and facts.digest(file, False) != sampled
