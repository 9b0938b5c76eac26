"""The facts of a node and its GPUs, what the preflight makes of those of several."""

import json
import resource
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.commands import REPOSITORY
from helpers.configs import configured
from helpers.documented import require_error_line

from shardtune.cluster import compare, microbenchmark, node_info
from shardtune.cluster.environment import Environment, read_environment
from shardtune.config import KEYS
from shardtune.distributed import gpus, join
from shardtune.errors import UserError

NAMES = ["node 0 (a)", "node 1 (b)"]
WORLD = {f"parallel.{key}": "1" for key in ("stages", "replicate", "expert", "context", "tensor")}
FACTS: dict[str, Any] = {
    "versions": {"torch": "2.13.0"},
    "code": {},
    "environment": {"TORCH_DISTRIBUTED_DEBUG": "not set"},
    "tuning": {},
    "config": WORLD,
    "data": {},
    "model": {},
    "remarks": [],
    "warnings": [],
    "processes": 8,
    "run_dir": "runs/config",
    "free_disk_bytes": 1e13,
    "shares_run_dir": True,
    "clock_ahead_s": 0.0,
    "devices": {"the device": "H100"},
    "rdma_ports": "mlx5_0:1",
}
FIGURES: dict[str, Any] = {
    "inside": 3e11,
    "between": 4e10,
    "latency_s": 3e-5,
    "flops": [6e14, 7e14],
    "transport": "RoCE",
}
GPU = {"name": "H100", "memory": (79e9, 80e9)}


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({}, ""),
        ({"environment": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}, "TORCH_DISTRIBUTED_DEBUG is not "),
        (
            {"processes": 4, "config": WORLD | {"parallel.replicate": "2", "parallel.expert": "4"}},
            "parallel.expert=4 does not divide world size / parallel.replicate, 6 - use one of 1, ",
        ),
        ({"config": WORLD | {"parallel.tensor": "16"}}, "tensor=16 lets ranks of two nodes share"),
        ({"config": WORLD | {"new": "null"}}, "new is missing on node 0 (a) and null on node 1"),
        ({"clock_ahead_s": -40.0}, "the clock of node 1 (b) is 40.0 s behind that of node 0 (a)"),
    ],
)
def test_nodes_with_different_facts_are_refused(different, words):
    facts = [FACTS, FACTS | different]
    if "new" not in (config := different.get("config", WORLD)):
        facts[0] = FACTS | {"config": config}
    problems = compare.problems_of(facts, NAMES)
    assert [words in problem for problem in problems] == [True] * bool(different)
    for problem in problems:
        require_error_line(f"ERROR: {problem}")


def test_a_run_directory_that_only_some_nodes_share_is_refused():
    names = [*NAMES, "node 2 (c)"]
    alone = FACTS | {"shares_run_dir": False}
    (problem,) = compare.problems_of([FACTS, FACTS, alone], names)
    assert problem.startswith("run.dir runs/config is one directory on node 0 (a), node 1 (b) and ")
    require_error_line(f"ERROR: {problem}")
    assert not compare.problems_of([FACTS, alone, alone], names)  # each has a disk of its own


def test_the_first_differences_between_nodes_are_said_last():
    """A path that differs stands behind the files that differ for it."""
    code = {f"shardtune/{number:02}.py": "a digest" for number in range(14)}
    problems = compare.problems_of([FACTS, FACTS | {"code": code}], NAMES)
    assert problems[0].startswith("4 more differences in code - ") and len(problems) == 11
    require_error_line(f"ERROR: {problems[0]}")
    other = FACTS | {"config": WORLD | {"data.train": "x"}, "data": {"data.train: a.jsonl": "1"}}
    first, last = compare.problems_of([FACTS, other], NAMES)
    assert first.startswith("data.train: a.jsonl is ") and last.startswith("data.train is missing ")


@pytest.mark.parametrize(
    ("fact", "figure", "words"),
    [
        ({}, {}, ""),
        ({"warnings": ["/dev/shm has 64 MB"]}, {}, "node 1 (b): /dev/shm has 64 MB"),
        ({"tuning": {"NCCL_ALGO": "Ring"}}, {}, "NCCL_ALGO is missing on node 0 (a) and Ring on "),
        ({}, {"flops": [4.6e14, 5.9e14]}, "node 1 (b): device 0 is slow"),
        ({}, {"transport": "sockets"}, "node 1 (b): NCCL uses sockets"),
        ({}, {"flops": [9e14, 6e14]}, ""),  # one that is fast makes the others no slower
        ({"rdma_ports": ""}, {"transport": "sockets"}, ""),
    ],
)
def test_differences_between_nodes_that_only_slow_a_run_are_warned_of(fact, figure, words):
    facts, figures = [FACTS, FACTS | fact], [FIGURES, FIGURES | figure]
    warnings = compare.warnings_of(facts, figures, NAMES)
    assert [words in warning for warning in warnings] == [True] * bool(words)


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({}, ""),
        ({"gpus": [GPU | {"memory": (9e9, 80e9)}]}, "GPU 0 has only 9.0 of 80.0 GB free"),
        ({"shm": 64e6}, "/dev/shm has 64 MB"),
        ({"nofile": 256}, "only 256 open files"),
        ({"memlock": 65536}, "only 65536 bytes may be locked"),
    ],
)
def test_low_limits_of_a_node_are_warned_of(different, words, monkeypatch):
    here = {"gpus": [GPU], "shm": 1e11} | different
    limits = {
        resource.RLIMIT_NOFILE: here.pop("nofile", 1 << 20),
        resource.RLIMIT_MEMLOCK: here.pop("memlock", resource.RLIM_INFINITY),
    }
    shm = SimpleNamespace(total=here.pop("shm"))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shm)
    warnings = node_info._warnings(rdma_ports="mlx5_0:1", **here)
    assert [words in warning for warning in warnings] == [True] * bool(words)


@pytest.mark.parametrize(
    ("line", "transport"),
    [
        ("NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB enp26s0np0:10<0>", "RoCE"),
        ("NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB enp26s0np0:10.11.7.50<0>", "InfiniBand"),
        ("NET/Socket : Using [0]enp26s0np0:10.11.7.50<0>", "sockets"),
        ("Bootstrap: Using enp26s0np0:10.11.7.50<0>", ""),
    ],
)
def test_the_transport_is_the_one_that_nccl_names(line, transport):
    assert microbenchmark.transport(f"host:7:9 [0] NCCL INFO {line}\n") == transport


def test_rdma_ports_are_those_that_the_kernel_calls_active(tmp_path, monkeypatch):
    monkeypatch.setattr(node_info, "_RDMA_PORTS", tmp_path)
    assert node_info._rdma_ports() == ""
    states = {"mlx5_0/ports/1": "4: ACTIVE\n", "mlx5_0/ports/2": "1: DOWN\n"}
    for port, state in (states | {"mlx5_1/ports/1": "4: ACTIVE\n"}).items():
        (tmp_path / port).mkdir(parents=True)
        (tmp_path / port / "state").write_text(state, encoding="utf-8")
    assert node_info._rdma_ports() == "mlx5_0:1, mlx5_1:1"


def environment(*arguments: str) -> Environment:
    return read_environment({"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo"}, arguments)


def test_every_file_that_a_run_executes_is_compared(tmp_path):
    """At any depth: one that is left out may differ between nodes without a word."""
    code = node_info.node_facts(environment(f"run.dir={tmp_path}"))["code"]
    files = {str(file.relative_to(REPOSITORY)) for file in REPOSITORY.glob("shardtune/**/*.py")}
    folders = {name.count("/") for name in files}
    assert {1, 2} <= folders and files < code.keys()
    assert code.keys() - files == {"train_fsdp.py", "launch_node0.sh", "launch_node1.sh"}


def test_every_setting_but_those_of_a_node_is_compared(tmp_path):
    settings = node_info.node_facts(environment(f"run.dir={tmp_path}"))["config"]
    assert KEYS.keys() - settings.keys() == {"run.dir", "distributed.join_timeout_s"}


def test_packages_on_which_tokens_or_numbers_depend_are_compared(tmp_path):
    versions = node_info.node_facts(environment(f"run.dir={tmp_path}"))["versions"]
    names = {"torch", "transformers", "tokenizers", "datasets", "accelerate", "safetensors"}
    assert names | {"numpy", "jinja2", "Python"} <= versions.keys()
    for package in versions:
        different = FACTS | {"versions": versions | {package: "0.1"}}
        (line,) = compare.problems_of([FACTS | {"versions": versions}, different], ["a", "b"])
        assert line.startswith(f"{package} is {versions[package]} on a and 0.1 on b - ")


def test_a_model_that_no_run_reads_is_refused_before_ranks_start(tmp_path):
    values = {"model_type": "llama", "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    quantisation = json.dumps({"quantization": {"quant_algo": "NVFP4"}})
    (tmp_path / "hf_quant_config.json").write_text(quantisation, encoding="utf-8")
    facts = node_info.node_facts(environment(f"model.path={tmp_path}"))
    by_quantisation, by_positions = facts["problems"]
    assert f"model.path={tmp_path}: its weights are quantised by NVFP4, " in by_quantisation
    assert f"is beyond the 64 positions of {tmp_path} - " in by_positions
    require_error_line(f"ERROR: {by_quantisation}")


def test_only_files_that_are_read_are_compared(tmp_path, monkeypatch):
    for name in ("train.jsonl", "more.csv.gz", "NOTES.txt", ".hidden.jsonl", "saved/a/x.arrow"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    here = environment(f"data.train={tmp_path}", f"data.eval={tmp_path}/saved:a", "model.path=a/b")
    assert not [problem for problem in here.problems if "data.eval" in problem]
    facts = node_info.node_facts(here)
    assert list(facts["data"]) == [
        "data.train: more.csv.gz",
        "data.train: train.jsonl",
        "data.eval: x.arrow",
    ]


def test_weights_are_compared_whole_or_it_is_said(tmp_path, monkeypatch):
    """The last block of a file is always among the samples."""
    file, content, remarks = tmp_path / "model.safetensors", bytearray(50 << 20), list[str]()

    def digest() -> str:
        file.write_bytes(content)
        return node_info._digests("the weights", {file.name: file}, remarks)[file.name]

    whole = digest()
    content[len(content) // 2] ^= 1  # between two samples
    assert digest() != whole and not remarks
    monkeypatch.setattr(node_info, "WHOLE_BYTES", 1 << 20)
    sampled = digest()
    assert remarks == ["the weights: over 0 GiB, so each file's size and samples are compared"]
    content[-1] ^= 1
    assert digest() != sampled


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with two GPUs and an old driver, for which this PyTorch has no use."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_a_driver_too_old_for_the_wheel_is_refused_by_run_and_preflight(two_gpus, monkeypatch):
    with pytest.raises(UserError) as refused:
        join.join_world(configured())
    (problem,) = refused.value.problems
    assert "2 GPUs, " in problem and " R580 " in problem
    require_error_line(f"ERROR: {problem}")
    node = {"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo"}
    (of_node,) = node_info.node_facts(read_environment(node, ()))["problems"]
    assert of_node.endswith(problem) and of_node.startswith("node 0 (")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_and_gloo_train_on_cpus(two_gpus, hidden, monkeypatch):
    assert join._device_and_backend("gloo", 0) == (torch.device("cpu"), "gloo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert join._device_and_backend("auto", 0) == (torch.device("cpu"), "gloo")


def test_a_wheel_for_cpus_and_a_wrong_choice_of_gpus_have_their_own_remedies(two_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8")
    assert "CUDA_VISIBLE_DEVICES ('8')" in str(gpus.unseen_gpus())
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "install requirements.txt anew" in str(gpus.unseen_gpus())


def test_without_device_files_nvidia_smi_is_asked(two_gpus, monkeypatch):
    answers = {"-L": "GPU 0: NVIDIA H100 (UUID: 1)\n"}

    def answer(command: list[str], **_: Any) -> Any:
        text = next((text for key, text in answers.items() if command[1].startswith(key)), "")
        return SimpleNamespace(stdout=text, returncode=0)

    monkeypatch.setattr(gpus, "_DEVICES", two_gpus / "none")
    monkeypatch.setattr(subprocess, "run", answer)
    assert "1 GPUs, and" in str(gpus.unseen_gpus())
    answers.clear()
    assert gpus.unseen_gpus() is None


def test_gpus_that_do_not_answer_are_a_problem_of_their_node(monkeypatch):
    monkeypatch.setattr(node_info, "_GPU_TIMEOUT_S", 0.0)
    node = {"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo"}
    (problem,) = node_info.node_facts(read_environment(node, ()))["problems"]
    assert "did not answer within 0 s" in problem
    require_error_line(f"ERROR: {problem}")


@pytest.mark.parametrize("variable", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_gpu_gets_segments_that_grow_and_exact_sums(variable, monkeypatch):
    """Before it becomes the process's own, and unless the user has settings for the allocator."""
    calls: list[Any] = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:512")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True
    device = gpus.use_gpu(3)
    assert device == torch.device("cuda", 3)
    assert calls == [*["expandable_segments:True"] * (variable is None), device]
    assert matmul.allow_bf16_reduced_precision_reduction is False


def test_a_failure_of_nccl_is_not_taken_for_nodes_that_are_late(monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise dist.DistBackendError("NCCL error: unhandled system error\nLast error: no socket")

    monkeypatch.setattr(dist, "init_process_group", fail)
    with pytest.raises(UserError) as refused:
        join.join_world(configured())
    (problem,) = refused.value.problems
    assert "(NCCL error: unhandled system error) - " in problem
    require_error_line(f"ERROR: {problem}")
