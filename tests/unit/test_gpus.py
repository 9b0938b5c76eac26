"""GPUs that PyTorch does not see are named, and the settings of the one that is used."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.configs import configured
from helpers.documented import require_error_line

from shardtune.cluster import node_info
from shardtune.cluster.environment import read_environment
from shardtune.distributed import gpus, join
from shardtune.errors import UserError

VERSION = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
    "GCC version:  gcc version 11.4.0\n"
)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with two GPUs and an old driver, for which this PyTorch has no use."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    (tmp_path / "version").write_text(VERSION, encoding="utf-8")
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    monkeypatch.setattr(gpus, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_a_driver_too_old_for_the_wheel_is_refused_by_run_and_preflight(two_gpus, monkeypatch):
    with pytest.raises(UserError) as refused:
        join.join_world(configured())
    (problem,) = refused.value.problems
    assert "2 GPUs with driver 535.104.05, " in problem and " R580 " in problem
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
    answers = {"-L": "GPU 0: NVIDIA H100 (UUID: 1)\n", "--query-gpu": "535.1.2\n"}

    def answer(command: list[str], **_: Any) -> Any:
        text = next((text for key, text in answers.items() if command[1].startswith(key)), "")
        return SimpleNamespace(stdout=text, returncode=0)

    monkeypatch.setattr(gpus, "_DEVICES", two_gpus / "none")
    monkeypatch.setattr(gpus, "_DRIVER", two_gpus / "none")
    monkeypatch.setattr(subprocess, "run", answer)
    assert "1 GPUs with driver 535.1.2, and" in str(gpus.unseen_gpus())
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
