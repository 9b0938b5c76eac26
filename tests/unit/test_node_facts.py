"""The facts of a node, what the preflight makes of those of several, and of its measurements."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.documented import require_error_line

from shardtune.cluster import compare, microbenchmark, node_info
from shardtune.cluster.environment import Environment, read_environment

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
    "rdma_ports": "mlx5_0:1",
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
            "12 (8 + 4 processes on node 0 (a), node 1 (b)), which parallel.replicate=8 does no",
        ),
        (
            {"processes": 4, "config": {"parallel.replicate": 2, "parallel.expert": 4}},
            "and parallel.expert=4 does not divide 12 / 2 (parallel.",
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
        require_error_line(f"ERROR: {problem}")


def test_a_run_directory_that_some_nodes_share() -> None:
    names = ["node 0 (a)", "node 1 (b)", "node 2 (c)"]
    (problem,) = compare.problems_of_files([FACTS, FACTS, FACTS | {"shares_run_dir": False}], names)
    assert problem.startswith(
        "run.dir runs/config is one directory on node 0 (a), node 1 (b) and another on node 2 (c)"
    )
    require_error_line(f"ERROR: {problem}")
    alone = FACTS | {"shares_run_dir": False}
    assert not compare.problems_of_files([FACTS, alone, alone], names)  # each has a disk of its own


def test_the_first_differences_are_said_last() -> None:
    code = {f"shardtune/{number:02}.py": "a digest" for number in range(14)}
    problems = compare.problems_of_files(
        [FACTS, FACTS | {"code": code}], ["node 0 (a)", "node 1 (b)"]
    )
    assert problems[0].startswith("4 more differences in code - ") and len(problems) == 11
    require_error_line(f"ERROR: {problems[0]}")


@pytest.mark.parametrize(("key", "kind"), [("data.train", "data"), ("model.path", "model")])
def test_files_of_another_path(key: str, kind: str) -> None:
    """Only the path is reported then; files of the same path are compared."""

    def node(path: str, digest: str) -> dict[str, Any]:
        data = {f"{other}: a.jsonl": digest for other in ("data.train", "data.eval")}
        config = FACTS["config"] | {"data.train": "x", "model.path": "y", key: path}
        return FACTS | {"data": data, "model": {"config.json": {"shown": digest}}, "config": config}

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
            "node 1 (b): GPU 0 has only 9.0 of 80.0 GB free, another process holds the rest (",
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


@pytest.mark.parametrize(
    ("figure", "rdma_ports", "words"),
    [
        ({}, "mlx5_0:1", ""),
        (
            {"flops": [4.6e14, 5.9e14]},
            "mlx5_0:1",
            "node 1 (b): device 0 is slow, its GEMM runs at 460 TFLOP/s",
        ),
        (
            {"transport": "sockets"},
            "mlx5_0:1",
            "node 1 (b): NCCL uses sockets although RDMA ports are active (mlx5_0:1): steps may be",
        ),
        ({"transport": "sockets"}, "", ""),
    ],
)
def test_measurements_that_are_warned_of(
    figure: dict[str, Any], rdma_ports: str, words: str
) -> None:
    figures = [{"flops": [6e14, 6.1e14], "transport": "RoCE"}] * 2
    warnings = microbenchmark.warnings_of(
        [figures[0], figures[1] | figure],
        [FACTS, FACTS | {"rdma_ports": rdma_ports}],
        ["node 0 (a)", "node 1 (b)"],
    )
    assert [words in warning for warning in warnings] == [True] * bool(words)


@pytest.mark.parametrize(
    ("line", "transport"),
    [
        (
            "NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB enp26s0np0:10.11.7.50<0>",
            "RoCE",
        ),
        ("NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB enp26s0np0:10.11.7.50<0>", "InfiniBand"),
        ("NET/Socket : Using [0]enp26s0np0:10.11.7.50<0>", "sockets"),
        ("Bootstrap: Using enp26s0np0:10.11.7.50<0>", ""),
    ],
)
def test_the_transport_is_the_one_that_nccl_names(line: str, transport: str) -> None:
    log = (
        f"host:7:7 [0] NCCL INFO Bootstrap: Using lo:127.0.0.1<0>\nhost:7:9 [0] NCCL INFO {line}\n"
    )
    assert microbenchmark.transport(log) == transport


def test_the_table_names_the_transport() -> None:
    figure = {"inside": 3e11, "between": 4e10, "latency_s": 3e-5, "flops": [6e14, 7e14]}
    figures = [figure | {"transport": "RoCE"}] * 2
    head, first, second = microbenchmark.table(figures, ["8 x H100"] * 2, ["a", "b"])
    assert "  of all nodes (RoCE)  latency" in head
    cells = ["0", "a", "8 x H100", "300 GB/s", "40 GB/s", "30 us", "600..700 TFLOP/s"]
    assert re.split(r"\s{2,}", first) == cells
    assert second.split()[:2] == ["1", "b"]


def test_rdma_ports_are_those_that_the_kernel_calls_active(tmp_path: Path) -> None:
    states = {"mlx5_0/ports/1": "4: ACTIVE\n", "mlx5_0/ports/2": "1: DOWN\n"}
    for port, state in (states | {"mlx5_1/ports/1": "4: ACTIVE\n"}).items():
        (tmp_path / port).mkdir(parents=True)
        (tmp_path / port / "state").write_text(state, encoding="utf-8")
    assert node_info._rdma_ports(tmp_path) == "mlx5_0:1, mlx5_1:1"
    assert node_info._rdma_ports(tmp_path / "none") == ""


def test_packages_on_which_tokens_or_numbers_depend_are_compared(tmp_path: Path) -> None:
    versions = node_info.facts_of_files(environment(f"run.dir={tmp_path}"))["versions"]
    names = {"torch", "transformers", "tokenizers", "datasets", "accelerate", "safetensors"}
    assert names | {"numpy", "jinja2", "Python"} == versions.keys()
    for package in versions:
        different = FACTS | {"versions": versions | {package: "0.1"}}
        (line,) = compare.problems_of_files([FACTS | {"versions": versions}, different], ["a", "b"])
        assert line == (
            f"{package} is {versions[package]} on a and 0.1 on b - "
            "install the same requirements.txt on every node"
        )


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_info, "_gpus", lambda: {"gpus": FACTS["gpus"][:1]})
    (problem,) = node_info.facts_of_machine(environment())["problems"]
    assert "GPUS_PER_NODE is 8 and 1 GPUs are visible - " in problem
    require_error_line(f"ERROR: {problem}")


def test_the_nccl_that_is_loaded_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may have been built with another one."""

    class Library:
        def __init__(self, name: str, mode: int) -> None:
            assert (name, mode) == ("libnccl.so.2", os.RTLD_NOLOAD)

        def ncclGetVersion(self, number: Any) -> None:  # a name of NCCL's
            number._obj.value = 22805

    monkeypatch.setattr("ctypes.CDLL", Library)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    monkeypatch.setattr(node_info, "_gpus", lambda: {"gpus": []})
    libraries = node_info.facts_of_machine(environment())["libraries"]
    assert libraries == {"CUDA": "13.0", "NCCL": "2.28.5"}


def environment(*arguments: str) -> Environment:
    return read_environment({"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo"}, arguments)


def test_only_files_that_are_read_are_compared(tmp_path: Path) -> None:
    for name in ("train.jsonl", "NOTES.txt"):
        (tmp_path / name).touch()
    found = node_info._data(
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
        return node_info._model(tmp_path, remarks)[file.name]["shown"], remarks

    before, remarks = told()
    content[len(content) // 2 + (1 << 20)] ^= 1  # between two samples
    assert told()[0] != before and not remarks
    monkeypatch.setattr(node_info, "_WHOLE_BYTES", 1 << 20)
    _, remarks = told()
    assert remarks == [
        "the model's weights: over 0 GiB, so each file's size and samples are compared"
    ]


def test_data_that_is_too_large_to_read_is_sampled(tmp_path: Path) -> None:
    """The last block of a file is always among the samples."""
    file = tmp_path / "train.jsonl"
    content = bytearray(20 << 20)
    file.write_bytes(content)
    whole, sampled = (node_info.digest(file, is_whole) for is_whole in (True, False))
    content[-1] = 1
    file.write_bytes(content)
    assert node_info.digest(file, True) != whole and node_info.digest(file, False) != sampled
