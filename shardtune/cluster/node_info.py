"""Collects facts about a node: versions, code, configuration, data, model, machine."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from shardtune.cluster.child import Child, Message, Pipe, results
from shardtune.cluster.environment import DATA_SUFFIXES, REPOSITORY, Environment, existing_part
from shardtune.config_io import to_dict

# Of more than this only blocks at even distances are read.
_WHOLE_BYTES = 4 << 30
_BLOCK_BYTES = 1 << 20
_BLOCKS = 16
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
# Variables of NCCL and gloo, but for those that name a node's devices and files or log more.
_TUNING = re.compile(r"(NCCL|GLOO|TORCH_NCCL)_(?!.*(IFNAME|HCA|FILE|DEBUG|TRACE|DUMP|HOSTID))")
_MAY_DIFFER = ("run.dir", "distributed.join_timeout_s")
_GPU_TIMEOUT_S = 60.0
# Packages on which tokens or numbers depend.
_PACKAGES = (
    *("torch", "transformers", "tokenizers", "datasets"),
    *("accelerate", "safetensors", "numpy", "jinja2"),
)


def facts_of_files(environment: Environment) -> Message:
    """Collect what is installed and what the run reads; quick, since nothing large is imported."""
    config = environment.config
    assert config is not None
    remarks: list[str] = []
    flat = {
        f"{name}.{key}": value
        for name, section in to_dict(config).items()
        for key, value in section.items()
    }
    model = _model(Path(config.model.path), remarks)
    return {
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES}
        | {"Python": ".".join(platform.python_version_tuple()[:2])},
        "code": _code(),
        # Ranks with these meet once more, which the others would not.
        "environment": {
            "TORCH_DISTRIBUTED_DEBUG": _debug_level(),
            "TORCH_DIST_INIT_BARRIER": os.environ.get("TORCH_DIST_INIT_BARRIER", "not set"),
            "MAX_RESTARTS": environment.max_restarts,
        },
        "tuning": {name: value for name, value in os.environ.items() if _TUNING.match(name)},
        "config": {key: value for key, value in flat.items() if key not in _MAY_DIFFER},
        "data": _data({"data.train": config.data.train, "data.eval": config.data.eval}, remarks),
        "model": model,
        "weights_bytes": sum(entry["bytes"] for entry in model.values() if entry["is_weights"]),
        "remarks": remarks,
        "processes": environment.processes,
        "run_dir": config.run.dir,
        "free_disk_bytes": shutil.disk_usage(existing_part(Path(config.run.dir))).free,
    }


def facts_of_machine(environment: Environment) -> Message:
    """Collect devices and limits. torch is imported here; CUDA begins in a fork only."""
    import torch

    assert environment.config is not None
    report = _gpus()
    if report.get("problems"):
        return report
    gpus = [] if environment.config.distributed.backend == "gloo" else report["gpus"]
    problems = []
    if gpus and (environment.processes or 0) > len(gpus):
        problems.append(
            f"{environment.name}: GPUS_PER_NODE is {environment.processes} and {len(gpus)} GPUs "
            "are visible - set it to that number, or look at CUDA_VISIBLE_DEVICES and nvidia-smi"
        )
    nofile, memlock = (
        resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    )
    cuda = torch.version.cuda
    return {
        "problems": problems,
        "libraries": {
            "CUDA": cuda or "none",
            "NCCL": _nccl_version() or ".".join(map(str, torch.cuda.nccl.version()))
            if cuda
            else "none",
        },
        "device": "GPU" if gpus else "CPU",
        "gpus": gpus[: environment.processes],
        "gpu_users": _ask_nvidia("--query-compute-apps=pid,process_name,used_memory")
        if gpus
        else "",
        "driver": _ask_nvidia("--query-gpu=driver_version").partition("; ")[0] if gpus else "",
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        "nofile": nofile,
        "memlock": memlock,
        "rdma_ports": _rdma_ports(Path("/sys/class/infiniband")),
    }


def _gpus() -> Message:
    """List the GPUs in a process of its own: one that has used CUDA cannot fork the ranks."""
    name = "the look at the GPUs"
    late = (
        f"{name} took more than {_GPU_TIMEOUT_S:.0f} s - "
        "see whether nvidia-smi answers, and restart the machine"
    )
    return results([Child(name, _report_gpus)], _GPU_TIMEOUT_S, lambda _: late, 0)[0]


def _report_gpus(pipe: Pipe) -> None:
    import torch

    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(number)
        gpus.append(
            {"name": torch.cuda.get_device_name(number), "free_bytes": free, "total_bytes": total}
        )
    pipe.send({"gpus": gpus})


def _rdma_ports(devices: Path) -> str:
    """List the active RDMA ports as `mlx5_0:1`, from the kernel's files."""
    states = sorted(devices.glob("*/ports/*/state"))
    active = [s for s in states if "ACTIVE" in s.read_text(encoding="utf-8")]
    return ", ".join(f"{state.parents[2].name}:{state.parent.name}" for state in active)


def _nccl_version() -> str | None:
    """Read the version of the library that torch has loaded, or None where it is part of torch.

    torch.cuda.nccl.version() is the one that torch was built with; the packages nvidia-nccl-cu*,
    LD_PRELOAD and LD_LIBRARY_PATH choose the other. The number is NCCL_VERSION of nccl.h (2.9 on).
    """
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"


def _debug_level() -> str:
    is_detail = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
    return "DETAIL" if is_detail else "not DETAIL"


def _ask_nvidia(query: str) -> str:
    try:
        asked = ["nvidia-smi", query, "--format=csv,noheader"]
        text = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def _code() -> dict[str, str]:
    """Digest every file that a run executes, by its path in the repository."""
    files: Iterable[Path] = (
        file
        for pattern in ("train_fsdp.py", "launch_node*.sh", "shardtune/**/*.py", "distTest/**/*")
        for file in REPOSITORY.glob(pattern)
        if file.suffix in (".py", ".sh")
    )
    return {
        str(file.relative_to(REPOSITORY)): xxhash.xxh3_64(file.read_bytes()).hexdigest()
        for file in sorted(files)
    }


def agents_digest() -> str:
    """Digest the programs that meet: only equal ones understand more than a hello."""
    return digest_of({name: d for name, d in _code().items() if "shardtune/cluster/" in name})


def _data(specs: dict[str, str | None], remarks: list[str]) -> dict[str, str]:
    """Give size and digest of every file of the data, by key and name."""
    files = {}
    for key, spec in specs.items():
        if spec is not None and not Path(spec).exists():
            remarks.append(f"{key}={spec} is a dataset of the hub and not compared before the run")
        elif spec is not None:
            path = Path(spec)
            read = (
                [file for file in _files_in(path) if file.suffix in DATA_SUFFIXES]
                if path.is_dir()
                else [path]
            )
            for file in read:
                files[f"{key}: {file.name}"] = file
    is_whole = _is_read_whole("the data", files.values(), remarks)
    return {
        name: f"{file.stat().st_size} bytes, digest {digest(file, is_whole)}"
        for name, file in files.items()
    }


def _model(folder: Path, remarks: list[str]) -> dict[str, dict[str, Any]]:
    """Give size and digest of every file of the model's directory; large ones are sampled."""
    if not folder.is_dir():
        remarks.append(f"model.path={folder} is a name of the hub; the ranks compare its revision")
        return {}
    entries, files = {}, _files_in(folder)
    weights = [file for file in files if file.suffix in _WEIGHT_SUFFIXES]
    is_whole = _is_read_whole("the model's weights", weights, remarks)
    for file in files:
        size, is_weights = file.stat().st_size, file in weights
        shown = f"{size} bytes, digest {digest(file, is_whole=is_whole or not is_weights)}"
        entries[file.name] = {"bytes": size, "is_weights": is_weights, "shown": shown}
    return entries


def _is_read_whole(what: str, files: Iterable[Path], remarks: list[str]) -> bool:
    is_whole = sum(file.stat().st_size for file in files) <= _WHOLE_BYTES
    if not is_whole:
        remarks.append(
            f"{what}: over {_WHOLE_BYTES >> 30} GiB, so each file's size and samples are compared"
        )
    return is_whole


def _files_in(folder: Path) -> list[Path]:
    return sorted(
        entry for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith(".")
    )


def digest(file: Path, is_whole: bool) -> str:
    """Hash a file's content, or blocks at even distances from the first to the last, with xxh3."""
    hasher = xxhash.xxh3_64()
    size = file.stat().st_size
    with file.open("rb") as stream:
        if is_whole or size <= _BLOCKS * _BLOCK_BYTES:
            while block := stream.read(8 * _BLOCK_BYTES):
                hasher.update(block)
        else:
            for number in range(_BLOCKS):
                stream.seek((size - _BLOCK_BYTES) * number // (_BLOCKS - 1))
                hasher.update(stream.read(_BLOCK_BYTES))
    return hasher.hexdigest()


def digest_of(value: Any) -> str:
    """A short name for anything that JSON holds."""
    return xxhash.xxh3_64(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
