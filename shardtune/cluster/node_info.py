"""What must be the same on every node, or is worth a warning: versions, code, configuration, data, model, machine."""

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

from shardtune.cluster.children import Child, results
from shardtune.cluster.control import Link, Message
from shardtune.cluster.environment import DATA_SUFFIXES, REPOSITORY, Settings, existing_part
from shardtune.config_io import to_dict

# More than this is not read whole: then blocks at even distances of every file.
_WHOLE_BYTES = 4 << 30
_BLOCK_BYTES = 1 << 20
_BLOCKS = 16
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
# Of NCCL and gloo, without what names a node's own devices and files or says more.
_TUNING = re.compile(r"(NCCL|GLOO|TORCH_NCCL)_(?!.*(IFNAME|HCA|FILE|DEBUG|TRACE|DUMP|HOSTID))")
_MAY_DIFFER = ("run.dir", "distributed.join_timeout_s")
_GPU_TIMEOUT_S = 60.0


def facts_of_files(settings: Settings) -> Message:
    """What this node has installed, and what it is to run on; quick, since nothing large is imported."""
    config = settings.config
    assert config is not None
    remarks: list[str] = []
    flat = {
        f"{name}.{key}": value
        for name, section in to_dict(config).items()
        for key, value in section.items()
    }
    model = _model(Path(config.model.path), remarks)
    packages = ("torch", "transformers", "datasets", "safetensors")
    return {
        "versions": {name: importlib.metadata.version(name) for name in packages}
        | {"Python": ".".join(platform.python_version_tuple()[:2])},
        "code": _code(),
        # Ranks with these meet once more, which the others would not.
        "environment": {
            "TORCH_DISTRIBUTED_DEBUG": _debug_level(),
            "TORCH_DIST_INIT_BARRIER": os.environ.get("TORCH_DIST_INIT_BARRIER", "not set"),
        },
        "tuning": {name: value for name, value in os.environ.items() if _TUNING.match(name)},
        "config": {key: value for key, value in flat.items() if key not in _MAY_DIFFER},
        "data": _data({"data.train": config.data.train, "data.eval": config.data.eval}, remarks),
        "model": model,
        "weights_bytes": sum(entry["bytes"] for entry in model.values() if entry["is_weights"]),
        "remarks": remarks,
        "processes": settings.processes,
        "run_dir": config.run.dir,
        "free_disk_bytes": shutil.disk_usage(existing_part(Path(config.run.dir))).free,
    }


def facts_of_machine(settings: Settings) -> Message:
    """Its devices and limits. torch is imported here, and CUDA begun in a fork alone."""
    import torch

    assert settings.config is not None
    found = _gpus()
    if found.get("problems"):
        return found
    gpus = [] if settings.config.distributed.backend == "gloo" else found["gpus"]
    problems = []
    if gpus and (settings.processes or 0) > len(gpus):
        problems.append(
            f"{settings.name}: GPUS_PER_NODE is {settings.processes} and {len(gpus)} GPUs are visible - set it "
            "to that number, or look at CUDA_VISIBLE_DEVICES and nvidia-smi"
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
        "gpus": gpus[: settings.processes],
        "gpu_users": _ask_nvidia("--query-compute-apps=pid,process_name,used_memory")
        if gpus
        else "",
        "driver": _ask_nvidia("--query-gpu=driver_version").partition("; ")[0] if gpus else "",
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        "nofile": nofile,
        "memlock": memlock,
        "has_rdma": Path("/sys/class/infiniband").is_dir()
        and any(Path("/sys/class/infiniband").iterdir()),
    }


def _gpus() -> Message:
    """In a process of its own: one that has used CUDA cannot fork the ranks."""
    name = "the look at the GPUs"
    late = f"{name} took more than {_GPU_TIMEOUT_S:.0f} s - see whether nvidia-smi answers, and restart the machine"
    return results([Child(name, _report_gpus)], _GPU_TIMEOUT_S, lambda _: late, 0)[0]


def _report_gpus(link: Link) -> None:
    import torch

    found = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(number)
        found.append(
            {"name": torch.cuda.get_device_name(number), "free_bytes": free, "total_bytes": total}
        )
    link.send({"gpus": found})


def _nccl_version() -> str | None:
    """Of the library that torch has loaded; torch.cuda.nccl.version() is the one that torch was built with.

    The packages nvidia-nccl-cu*, LD_PRELOAD and LD_LIBRARY_PATH choose it. Its number is NCCL_VERSION of nccl.h, as of
    2.9. None where it is no library of its own.
    """
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number))
    except OSError:
        return None
    return f"{number.value // 10_000}.{number.value // 100 % 100}.{number.value % 100}"


def _debug_level() -> str:
    return (
        "DETAIL"
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
        else "not DETAIL"
    )


def _ask_nvidia(query: str) -> str:
    try:
        asked = ["nvidia-smi", query, "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(line.strip() for line in said.splitlines() if line.strip())


def _code() -> dict[str, str]:
    """Of every file that a run executes, by its path in the repository."""
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


def preflight_digest() -> str:
    """Of the programs that meet; only where they are the same do they understand each other beyond `hello`."""
    return digest_of(
        {name: found for name, found in _code().items() if name.startswith("distTest/")}
    )


def _data(specs: dict[str, str | None], remarks: list[str]) -> dict[str, str]:
    """Of every file of the data its size and digest, by key and name."""
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
    """Of every file of the model's directory what it is compared by: its size, and its content or samples of it."""
    if not folder.is_dir():
        remarks.append(
            f"model.path={folder} is a name of the hub, of which the ranks compare the revision"
        )
        return {}
    found, files = {}, _files_in(folder)
    weights = [file for file in files if file.suffix in _WEIGHT_SUFFIXES]
    is_whole = _is_read_whole("the model's weights", weights, remarks)
    for file in files:
        size, is_weights = file.stat().st_size, file in weights
        told = f"{size} bytes, digest {digest(file, is_whole=is_whole or not is_weights)}"
        found[file.name] = {"bytes": size, "is_weights": is_weights, "told": told}
    return found


def _is_read_whole(what: str, files: Iterable[Path], remarks: list[str]) -> bool:
    is_whole = sum(file.stat().st_size for file in files) <= _WHOLE_BYTES
    if not is_whole:
        remarks.append(
            f"{what}: over {_WHOLE_BYTES >> 30} GiB, so samples of each file are compared, and its size"
        )
    return is_whole


def _files_in(folder: Path) -> list[Path]:
    return sorted(
        entry for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith(".")
    )


def digest(file: Path, is_whole: bool) -> str:
    """xxh3 of a file's content, or of blocks of it at even distances, the first and the last among them."""
    found = xxhash.xxh3_64()
    size = file.stat().st_size
    with file.open("rb") as stream:
        if is_whole or size <= _BLOCKS * _BLOCK_BYTES:
            while block := stream.read(8 * _BLOCK_BYTES):
                found.update(block)
        else:
            for number in range(_BLOCKS):
                stream.seek((size - _BLOCK_BYTES) * number // (_BLOCKS - 1))
                found.update(stream.read(_BLOCK_BYTES))
    return found.hexdigest()


def digest_of(value: Any) -> str:
    """A short name for anything that JSON holds."""
    return xxhash.xxh3_64(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
