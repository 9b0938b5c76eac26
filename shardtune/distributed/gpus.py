"""The GPUs of this node: why PyTorch does not see them, and what a process sets on its own."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any, cast

import torch
import torch.utils.deterministic

_DEVICES = Path("/dev")
_SMI_TIMEOUT_S = 120.0  # without persistence mode each query starts the driver
_NO_GPU_WANTED = ("", "-1")  # values of CUDA_VISIBLE_DEVICES
# https://docs.nvidia.com/deploy/cuda-compatibility: the oldest driver of a major version of CUDA.
_OLDEST_DRIVER = {"12": "525", "13": "580"}


def unseen_gpus() -> str | None:
    """Return why PyTorch sees no GPU on a node that has some, as `<what> - <what to do>`, or None.

    A driver that is too old, a wheel for CPUs or a container without devices looks to PyTorch like
    a node without GPUs, and a run would train on CPUs.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda.is_available() or hidden in _NO_GPU_WANTED:
        return None
    count = len(
        [path for path in _DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    )
    if not (count := count or _smi("-L").count("GPU ")):
        return None
    cuda = torch.version.cuda
    torch_built = f"for CUDA {cuda}" if cuda else "for CPUs"
    remedy = "install requirements.txt anew, without an index of wheels for CPUs"
    if cuda:
        oldest = _OLDEST_DRIVER.get(cuda.partition(".")[0])
        needed = f"a driver of R{oldest} or newer" if oldest else "the driver that this CUDA needs"
        remedy = f"install {needed}, look at what `nvidia-smi` says"
        if hidden is not None:
            remedy = f"look at CUDA_VISIBLE_DEVICES ({hidden!r}), {remedy}"
    return (
        f"this node has {count} GPUs, and PyTorch {torch.__version__}, built {torch_built}, sees "
        f"none of them - {remedy}, or train on CPUs with distributed.backend=gloo"
    )


def _smi(*arguments: str) -> str:
    """Return what `nvidia-smi` prints; nothing where there is none, or where it fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            timeout=_SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def use_gpu(local_rank: int) -> torch.device:
    # Loading and packed rows ask for blocks of many sizes; segments of fixed size leave holes.
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    # Else cuBLAS may add up parts of a matrix product in bfloat16.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    # The backward of cuDNN's attention does not repeat to the bit, and varlen attention of PyTorch
    # 2.15 may use it.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Attention sets the deterministic flag for its backward, under which whatever any thread
    # allocates would be filled with NaN first.
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
