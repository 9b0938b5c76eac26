"""Collects facts about a node: versions, code, configuration, data, model, devices, limits."""

import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from shardtune.cluster.control import Message
from shardtune.cluster.environment import REPOSITORY, Environment, existing_part
from shardtune.config import Config
from shardtune.config_io import bare, shared_settings
from shardtune.distributed.measured import CPU
from shardtune.model.facts.of_config import problems_of_model
from shardtune.model.source.weight_files import WHOLE_BYTES, content_digest, tensors_digest
from shardtune.paths import kind_of, split_path
from shardtune.units import gb

_SAMPLE = 32, 1 << 20  # blocks at even distances, and bytes of each, of a large file
# Variables of NCCL and gloo, unless they name a node's own devices and files or only log more.
_TUNING = re.compile(r"(NCCL|GLOO|TORCH_NCCL)_(?!.*(IFNAME|HCA|FILE|DEBUG|TRACE|DUMP|HOSTID))")
# These variables decide when ranks communicate, so they must be equal on all ranks.
_RANKS_VARIABLES = ("TORCH_DISTRIBUTED_DEBUG", "TORCH_DIST_INIT_BARRIER", "MAX_RESTARTS")
_GPU_TIMEOUT_S = 300.0  # without persistence mode the driver starts for each GPU
_RDMA_PORTS = Path("/sys/class/infiniband")
# Packages on which tokens or numbers depend.
_PACKAGES = (
    *("torch", "transformers", "tokenizers", "datasets"),
    *("accelerate", "safetensors", "numpy", "jinja2"),
)
_SHM_BYTES = 1 << 29
_FILES = 1024


def node_facts(environment: Environment) -> Message:
    """Collect what `compare` compares, and this node's own `problems`, `warnings` and `remarks`."""
    assert environment.config is not None
    files = _file_facts(environment.config)
    # Of two of a name the first one is imported.
    packages = reversed(list(importlib.metadata.distributions()))
    versions = {each.name.lower(): each.version for each in packages}
    nccl = [name for name in versions if name.startswith("nvidia-nccl")]
    return {
        "versions": {name: versions.get(name, "missing") for name in (*_PACKAGES, *nccl)}
        | {"Python": ".".join(platform.python_version_tuple()[:2])},
        "code": _code(),
        "environment": {name: os.environ.get(name, "not set") for name in _RANKS_VARIABLES},
        "tuning": {name: value for name, value in os.environ.items() if _TUNING.match(name)},
        "config": {key: bare(value) for key, value in shared_settings(environment.config).items()},
        **files,
        **_machine_facts(environment, environment.config),
    }


def _file_facts(config: Config) -> Message:
    specs = config.data.paths
    data = {
        f"{key}: {file.name}": file
        for key, spec in specs.items()
        for file in _files_in(Path(*split_path(spec)))
        if kind_of(file.name) or file.suffix == ".arrow"
    }
    model = {file.name: file for file in _files_in(Path(config.model.path))}
    remarks = list[str]()
    return {
        "data": _digests("the data", data, remarks),
        "model": _digests("the model's files", model, remarks),
        "remarks": remarks,
    }


def _machine_facts(environment: Environment, config: Config) -> Message:
    # A process of its own asks: a process that has used CUDA cannot fork the ranks that measure.
    gpus: list[Message] = []
    ranks = (environment.nodes or 1) * (environment.processes or 1)
    problems = [f"{environment.name}: {problem}" for problem in problems_of_model(config, ranks)]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        look = pool.apply_async(_gpus, [config.distributed.backend])
        try:
            gpus, unseen = look.get(_GPU_TIMEOUT_S)
            problems += [f"{environment.name}: {problem}" for problem in unseen]
        except multiprocessing.TimeoutError:
            problems.append(
                f"{environment.name}: its GPUs did not answer within {_GPU_TIMEOUT_S:.0f} s - look "
                "at `nvidia-smi` and `dmesg` there; `nvidia-smi -pm 1` keeps the driver loaded"
            )
    if gpus and (environment.processes or 0) > len(gpus):
        problems.append(
            f"{environment.name}: GPUS_PER_NODE (or --processes) is {environment.processes} and "
            f"{len(gpus)} GPUs are visible - set it to that number, or look at "
            "CUDA_VISIBLE_DEVICES and nvidia-smi"
        )
    gpus = gpus[: environment.processes]
    rdma_ports = _rdma_ports()
    return {
        "problems": problems,
        "warnings": [*_warnings(gpus, rdma_ports)],
        "processes": environment.processes,
        "devices": {"the device": " and ".join(dict.fromkeys(gpu["name"] for gpu in gpus)) or CPU},
        "backend": "nccl" if gpus else "gloo",
        "rdma_ports": rdma_ports,
        "run_dir": config.run.dir,
        "free_disk_bytes": shutil.disk_usage(existing_part(Path(config.run.dir))).free,
    }


def _gpus(backend: str) -> tuple[list[Message], list[str]]:
    import torch

    from shardtune.distributed.gpus import unseen_gpus

    if backend == "gloo":
        return [], []
    if not torch.cuda.is_available():
        return [], list(filter(None, [unseen_gpus()]))
    gpus = [
        {"name": torch.cuda.get_device_name(number), "memory": torch.cuda.mem_get_info(number)}
        for number in range(torch.cuda.device_count())
    ]
    return gpus, []


def _rdma_ports() -> str:
    """List the active RDMA ports as `mlx5_0:1`, from the kernel's files."""
    states = sorted(_RDMA_PORTS.glob("*/ports/*/state"))
    active = [s for s in states if "ACTIVE" in s.read_text(encoding="utf-8")]
    return ", ".join(f"{state.parents[2].name}:{state.parent.name}" for state in active)


def _warnings(gpus: list[Message], rdma_ports: str) -> Iterator[str]:
    for number, gpu in enumerate(gpus):
        free, total = gpu["memory"]
        if free < 0.9 * total:
            room = f"{gb(free)} of {gb(total)} GB"
            yield f"GPU {number} has only {room} free, another process holds the rest (nvidia-smi)"
    shm_bytes = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    if shm_bytes < _SHM_BYTES:
        yield (
            f"/dev/shm has {shm_bytes / 1e6:.0f} MB, NCCL wants {_SHM_BYTES / 1e6:.0f} "
            "(docker: --shm-size)"
        )
    nofile, memlock = map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    if 0 <= nofile[0] < _FILES:
        yield f"only {nofile[0]} open files are allowed (ulimit -n), {_FILES} are safe"
    if gpus and rdma_ports and memlock[0] != resource.RLIM_INFINITY:
        yield f"only {memlock[0]} bytes may be locked in memory (ulimit -l), RDMA wants no limit"


def _code() -> dict[str, str]:
    patterns = ("train_fsdp.py", "launch_node*.sh", "shardtune/**/*.py")
    files = sorted(file for pattern in patterns for file in REPOSITORY.glob(pattern))
    return {str(file.relative_to(REPOSITORY)): _digest(file) for file in files}


def agents_digest() -> str:
    """Digest the programs that meet: only equal ones understand more than a hello."""
    return digest_of({name: d for name, d in _code().items() if "shardtune/cluster/" in name})


def _files_in(path: Path) -> list[Path]:
    """Return the file itself, or the files of a directory that are not hidden."""
    entries = sorted(path.iterdir()) if path.is_dir() else [path]
    return [entry for entry in entries if entry.is_file() and not entry.name.startswith(".")]


def _digests(what: str, files: Mapping[str, Path], remarks: list[str]) -> dict[str, str]:
    """Give size and digest of every file, by its name. Weights have the digest of their tensors."""
    sizes = {name: file.stat().st_size for name, file in files.items()}
    total = sum(sizes.values())
    if total > WHOLE_BYTES:
        remarks.append(
            f"{what}: over {WHOLE_BYTES >> 30} GiB, so each file's size and samples are compared"
        )
    return {
        name: f"{sizes[name]} bytes, digest {_digest(file, total)}" for name, file in files.items()
    }


def _digest(file: Path, all_bytes: int = 0) -> str:
    """Hash a file, or samples of it if its set of files is large."""
    if file.suffix == ".safetensors":
        with contextlib.suppress(ValueError):  # raised by one that is damaged
            return tensors_digest([file], all_bytes)
    sample = _SAMPLE if all_bytes > WHOLE_BYTES else None
    with file.open("rb") as stream:
        return content_digest(stream.fileno(), 0, file.stat().st_size, sample)


def digest_of(value: Any) -> str:
    return xxhash.xxh3_64(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
