"""What a checkpoint holds of a run: sharded weights and moments, each rank's random state, the position in the data."""

from __future__ import annotations

import platform
import shutil
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from ..errors import Refused, Stopped
from ..world import World
from .files import Checkpoint, commit, keep_newest, prepare_directory, rank_file, write_rank_file


def save_checkpoint(
    checkpoints: Path,
    keep: int,
    timeout_s: float,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    world: World,
) -> Path:
    """Write `checkpoint_<state["step"]>` and delete all but the newest `keep`; every rank takes part.

    Raises:
        Stopped: on every rank, if any could not write its part, or has not within `timeout_s` seconds; nothing
            half-written becomes visible.
    """
    step = state["step"]
    share = partial(_share, world, step, timeout_s)
    temporary = Path(share(lambda: str(prepare_directory(checkpoints, step)), main_only=True)[0])
    sharded = dict(_sharded_tensors(model, optimizer))
    local = {name: _local(tensor).detach().cpu().contiguous() for name, tensor in sharded.items()}
    local |= _random_state(world.device)
    about = {"host": socket.gethostname(), "chunks": {name: _chunk(tensor) for name, tensor in sharded.items()}}
    try:
        reports = share(lambda: write_rank_file(temporary, world.rank, local) | about)
        committed = share(
            lambda: str(_commit(temporary, checkpoints, keep, sharded, reports, state, world)), main_only=True
        )
    except Stopped:
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)  # its space may be what the next save lacks
        raise
    return Path(committed[0])


def _share(world: World, step: int, timeout_s: float, work: Callable[[], Any], main_only: bool = False) -> list[Any]:
    """Every rank's result of `work`, on every rank; an error of the disk on any of them stops all."""
    report: dict[str, Any] = {}
    if world.is_main or not main_only:
        try:
            report["result"] = work()
        except (OSError, SafetensorError) as error:
            report["problem"] = f"rank {world.rank} on {socket.gethostname()}: {error}"
    try:
        reports = world.gather(report, timeout_s)
        problems = [report["problem"] for report in reports if "problem" in report]
    except TimeoutError as error:
        problems = [f"{error} (distributed.save_timeout_s)"]
    if problems:
        raise Stopped(
            f"the checkpoint of step {step} was not saved: {problems[0]} - make room or mend the disk; "
            "the same command resumes from the last checkpoint"
        )
    return [report.get("result") for report in reports]


def _commit(
    temporary: Path,
    checkpoints: Path,
    keep: int,
    sharded: dict[str, torch.Tensor],
    reports: list[dict[str, Any]],
    state: dict[str, Any],
    world: World,
) -> Path:
    for report in reports:
        if not (temporary / report["file"]).is_file():
            raise OSError(
                f"{report['file']} of host {report['host']} is not in {checkpoints} as this node sees it; "
                "run.dir must be on a filesystem that all nodes share"
            )
    manifest = {
        "state": state,
        "world": {"size": world.size, "mesh": list(world.mesh.shape)},
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": safetensors.__version__,
            "python": platform.python_version(),
        },
        "files": [{key: report[key] for key in ("file", "bytes", "xxh3_128", "host")} for report in reports],
        "tensors": {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "chunks": [{"rank": rank} | report["chunks"][name] for rank, report in enumerate(reports)],
            }
            for name, tensor in sharded.items()
        },
    }
    final = commit(temporary, checkpoints, manifest)
    keep_newest(checkpoints, keep)
    return final


def load_checkpoint(
    checkpoint: Checkpoint, model: PreTrainedModel, optimizer: torch.optim.Optimizer, world: World
) -> None:
    """Put weights, moments and this rank's random state back, from an accepted checkpoint.

    Raises:
        Refused: a tensor is missing or of another shape on this rank; callers let the ranks agree.
    """
    _start_optimizer_state(optimizer)
    local = load_file(checkpoint.path / rank_file(world.rank))
    sharded = dict(_sharded_tensors(model, optimizer))

    wrong = [
        name
        for name, tensor in sharded.items()
        if name not in local or local[name].shape != _local(tensor).shape or local[name].dtype != tensor.dtype
    ]
    if wrong:
        raise Refused(
            f"{checkpoint.path}: tensor {wrong[0]} ({len(wrong)} in all) is missing or of another shape "
            "- resume with the model that the checkpoint is of"
        )
    with torch.no_grad():
        for name, tensor in sharded.items():
            _local(tensor).copy_(local[name])
    torch.set_rng_state(local["rng.cpu"])
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(local["rng.cuda"], world.device)


def _sharded_tensors(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the training state by a lasting name; tied weights appear once."""
    for name, parameter in model.named_parameters():
        yield f"model.{name}", parameter
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"optimizer.{key}.{name}", value
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield f"model.{name}", buffer


def _start_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create Adam's state as its first step would, without taking that step: it would change the weights."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=_local(parameter).device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _chunk(tensor: torch.Tensor) -> dict[str, list[int]]:
    """Where this rank's part lies in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return {"offsets": [0] * tensor.dim(), "sizes": list(tensor.shape)}
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return {"offsets": list(offsets), "sizes": list(sizes)}


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"rng.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["rng.cuda"] = torch.cuda.get_rng_state(device)
    return states


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
