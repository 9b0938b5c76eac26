"""Save while training continues: the loop waits until tensors are copied, a thread writes them."""

import json
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from shardtune.checkpoint import durable_fs
from shardtune.checkpoint.commit import SaveAttempt, delete_messages, write_and_commit
from shardtune.checkpoint.manifest import (
    Checkpoint,
    build_manifest,
    checkpoint_name,
    open_checkpoint,
    rank_file,
)
from shardtune.checkpoint.mirror import Mirror
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.safetensors_writer import write_safetensors
from shardtune.checkpoint.slices import slices_to_write
from shardtune.checkpoint.train_state import random_state, training_state
from shardtune.config import CheckpointConfig
from shardtune.distributed.host_memory import available_memory, pinned_zeros
from shardtune.distributed.tensors import dtype_name, to_local
from shardtune.distributed.world import World
from shardtune.errors import AGAIN, RunFailed
from shardtune.log import logger, node_logger
from shardtune.metrics_schema import SaveEntry
from shardtune.units import gb, rounded_gb

# After the deadline: an attempt that has not ended by then waits for a dead disk.
_STUCK_AFTER_S = 90


class Staging:
    """A copy of tensors in host memory that is allocated once.

    Memory for GPUs is pinned, and copied to on a side stream: training goes on meanwhile, and the
    next update of the weights waits for the copy. Only one save at a time may use it.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        n_bytes = staged_bytes(tensors)
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            memory = pinned_zeros(n_bytes, "checkpoints", "use checkpoint.mode=sync")
        else:
            memory = torch.empty(n_bytes, dtype=torch.uint8)
        self._copies: dict[str, torch.Tensor] = {}
        begin = 0
        for name, tensor in tensors.items():
            part = memory[begin : begin + tensor.nbytes]
            self._copies[name] = part.view(tensor.dtype).view(tensor.shape)
            begin += _aligned(tensor.nbytes)

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin to copy these tensors, over earlier copies that must have been written."""
        if self._stream is None:
            for name, tensor in tensors.items():
                self._copies[name].copy_(tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                self._copies[name].copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.Event(blocking=True)
        self._copied.record(self._stream)

    def before_update(self, *_: Any) -> None:
        """Make the current stream wait for the copy, before the tensors change."""
        if self._stream is not None and self._copied is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def wait(self) -> dict[str, torch.Tensor]:
        """Return the copies once they are whole. May be called in another thread."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copies


def make_staging(tensors: Mapping[str, torch.Tensor], world: World) -> Staging | None:
    """Allocate memory for a rank's tensors, or return None where a node lacks it. Collective.

    Raises RunFailed.
    """
    size, available = staged_bytes(tensors), available_memory()
    per_rank = world.all_gather_json([world.node_rank, size, available])
    for node in sorted({node for node, _, _ in per_rank}):
        needed = sum(size for of_node, size, _ in per_rank if of_node == node)
        free = min(available for of_node, _, available in per_rank if of_node == node)
        if needed > free:
            logger.info(
                f"Checkpoint staging: checkpoint.mode=async needs {gb(needed)} GB of host "
                f"memory on node {node}, and {gb(free)} GB are free. Saves are "
                "synchronous: training waits for the disk"
            )
            return None
    largest = max(size for _, size, _ in per_rank)
    logger.info(f"Checkpoint staging: {gb(largest, 2)} GB of host memory per rank")
    return Staging(tensors, world.device)


def staged_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in tensors.values())


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


class Saver:
    """Saves the checkpoints of one run, one at a time. Every method is collective.

    `assets` are the files beside the tensors that make a checkpoint a model: configuration and
    tokenizer. `disk_bytes`: what one checkpoint takes of this rank's disk.
    """

    def __init__(
        self,
        run_dir: RunDir,
        config: CheckpointConfig,
        timeout_s: float,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        assets: Mapping[str, bytes],
        world: World,
    ) -> None:
        self._run_dir, self._config, self._timeout_s = run_dir, config, timeout_s
        self._assets, self._world = assets, world
        self._tensors = training_state(model, optimizer)
        self._host = getattr(optimizer, "host", None)  # tensors in host memory
        self._tied_weights = dict(model.all_tied_weights_keys)
        self._offsets, self._kinds = slices_to_write(self._tensors, world)
        # None: each save is written from the run's own tensors, while training waits.
        self._staging: Staging | None = None
        if config.mode == "async":
            self._staging = make_staging(self._own_tensors(), world)
        if self._staging:
            optimizer.register_step_pre_hook(self._staging.before_update)
        host = {"node": world.node_rank, "host": socket.gethostname()}
        own_bytes = sum(tensor.nbytes for tensor in self._own_tensors().values())
        per_rank = world.all_gather_json([host, own_bytes])
        self._hosts = [host for host, _ in per_rank]
        parts = Counter[int]()  # by the leaders of the disks
        for leader, (_, n_bytes) in zip(run_dir.leader_of, per_rank, strict=True):
            parts[leader] += n_bytes
        self.disk_bytes = parts[run_dir.leader_of[world.rank]] + sum(map(len, assets.values()))
        is_mirrored = config.mirror is not False and not run_dir.is_shared
        self._mirror = Mirror(run_dir, parts, world) if is_mirrored else None
        if run_dir.is_leader(world):
            self._warn_of_full_disk(self._mirror.expected_bytes if self._mirror else 0)
        self._run_id = world.on_rank0(lambda: secrets.token_hex(4))
        # The thread has a connection of its own: a wait on a shared one blocks its other users.
        store = cast(Any, world.store).clone()
        self._store = dist.PrefixStore(f"checkpoint/{self._run_id}", store)
        self._attempts: list[SaveAttempt] = []
        self._thread: threading.Thread | None = None
        self._outcome: list[str | None] | None = None  # the thread's problem, or None
        self._problem: str | None = None
        self.not_saved = ""  # which save has failed and why, until one succeeds

    def _warn_of_full_disk(self, mirrored_bytes: int) -> None:
        directory = self._run_dir.checkpoints
        free, needed = durable_fs.free_bytes(directory), self.disk_bytes + mirrored_bytes
        if free < needed:
            part = " with its neighbour's part" if mirrored_bytes else ""
            fails = "a save" if free < self.disk_bytes else "a copy of that part"
            node_logger.warning(
                f"The disk of {directory} has {rounded_gb(free)} free, and a checkpoint{part} "
                f"takes {rounded_gb(needed)} of it: {fails} fails, and training goes on - free "
                f"{rounded_gb(needed - free)}"
            )

    def save(
        self,
        state: dict[str, Any],
        before_write: Callable[[], None] = lambda: None,
        ended: Callable[[SaveEntry], None] = lambda _: None,
    ) -> None:
        """Start `checkpoint_<state["step"]>` after the previous save; with mode `sync`, finish it.

        `before_write` makes the files of this rank durable that must not lag behind the checkpoint.
        `ended` gets its line for `metrics.jsonl`. A save that fails is logged; training goes on.
        """
        began = time.perf_counter()
        self._wait()  # the previous save still reads the copies that this one overwrites
        attempt = self._new_attempt(state["step"])
        # Random states and tensors are copied now, since the next step changes them.
        tensors = self._own_tensors()
        if self._host:
            self._host.wait()
        random = random_state(self._world.rank, self._world.device)
        stall_s: float | None = None  # None: training waits until the save has ended
        if self._staging:
            self._staging.copy(tensors)
            stall_s = time.perf_counter() - began

        def write(directory: Path) -> dict[str, Any]:
            before_write()
            # A GPU may still be copying: the thread waits for it, training does not.
            written = self._staging.wait() if self._staging else tensors
            path = directory / rank_file(self._world.rank)
            return _write_rank_file(path, written | random, self._offsets)

        def has_ended(problem: str | None) -> None:
            seconds = time.perf_counter() - began
            entry = SaveEntry(
                kind="save",
                step=state["step"],
                seconds=seconds,
                stall_seconds=seconds if stall_s is None else stall_s,
                problem=problem,
            )
            ended(entry)

        self._outcome = None
        arguments = (attempt, state, write, has_ended)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()
        if not self._staging:
            self._wait()

    def _new_attempt(self, step: int) -> SaveAttempt:
        if self._world.is_main and self._attempts:
            delete_messages(self._attempts[-1])  # all ranks have waited for its end
        number = len(self._attempts) + 1
        name, directory = checkpoint_name(step), self._run_dir.checkpoints
        attempt = SaveAttempt(
            # The name is unique among the attempts of this run and of killed ones.
            staging=directory / f".{name}.{self._run_id}{number:04d}",
            final=directory / name,
            rank=self._world.rank,
            leader_of=self._run_dir.leader_of,
            keep=self._config.keep,
            assets=self._assets,
            disk_bytes=self.disk_bytes,
            store=dist.PrefixStore(f"{number}", self._store),
            timeout_s=self._timeout_s,
            is_mirrored=self._mirror is not None and self._mirror.agree_to_start(name),
            pinned=self._mirror.under_way if self._mirror else None,
        )
        self._attempts.append(attempt)
        return attempt

    def _run(
        self,
        attempt: SaveAttempt,
        state: Mapping[str, Any],
        write: Callable[[Path], dict[str, Any]],
        has_ended: Callable[[str | None], None],
    ) -> None:
        """Write and commit, in the thread. `_wait` exchanges the outcomes of all ranks."""
        name, problem = attempt.final.name, None

        def describe(reports: list[dict[str, Any]]) -> dict[str, Any]:
            kinds, tied = self._kinds, self._tied_weights
            return build_manifest(reports, kinds, tied, state, self._hosts, self._world)

        try:
            write_and_commit(attempt, write, describe)
            logger.info(f"Saved {name}")
            self.not_saved = ""
        except Exception as error:
            problem = attempt.describe(error)
            self.not_saved = f"{name} was not saved: {problem}"
            node_logger.info(f"Not saved: {name}: {problem}")
        has_ended(problem)
        if self._mirror and attempt.is_mirrored and not problem:
            self._mirror.start(attempt)
        self._outcome = [problem]

    def finish(self) -> Checkpoint:
        """Wait for the current save and its copies, and open it. Raises RunFailed."""
        self._wait()
        path = self._attempts[-1].final
        if self._problem:
            self._fail(f"{self._problem} - make room or mend the disk")
        if self._mirror:
            self._mirror.finish(self._attempts[-1])
            self._world.all_gather_json(None)  # no rank ends while others copy
        checkpoint = open_checkpoint(path)
        leader_of = self._run_dir.leader_of
        holders = {name: [leader_of[file["rank"]]] for name, file in checkpoint.files.items()}
        return replace(checkpoint, holders=holders)

    def _wait(self) -> None:
        """Wait until the current save has ended on every rank. Raises RunFailed."""
        if self._thread is None:
            return
        self._thread.join(self._timeout_s + _STUCK_AFTER_S)
        outcomes = self._world.all_gather_json(self._outcome)
        if None in outcomes:
            self._fail(f"the disk of rank {outcomes.index(None)} does not answer - mend it")
        self._thread = None
        self._problem = next((problem for [problem] in outcomes if problem), None)

    def _fail(self, problem: str) -> None:
        raise RunFailed(f"{self._attempts[-1].final.name} was not saved: {problem}; {AGAIN}")

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        return {name: to_local(self._tensors[name]).detach() for name in self._offsets}


def _write_rank_file(
    path: Path, tensors: Mapping[str, torch.Tensor], offsets: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Write a rank's file, and return its report: the file's entry and its chunks.

    Its header lets torch.distributed.checkpoint's HuggingFaceStorageReader read it.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # wide dtypes first
    tensors = {name: tensors[name] for name in names}
    of_all = {name: offsets.get(name, (0,)) for name in tensors}  # a random state is a vector
    sharding = {name: {"saved_offsets": first} for name, first in of_all.items()}
    written, ranges = write_safetensors(
        path,
        {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()},
        (tensor.cpu() for tensor in tensors.values()),
        {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding)},
    )
    chunks = {
        name: {
            "offsets": of_all[name],
            "sizes": tensor.shape,
            "file": path.name,
            "begin": ranges[name][0],
            "end": ranges[name][1],
            "xxh3_128": digest,
            "dtype": dtype_name(tensor.dtype),
        }
        for (name, tensor), digest in zip(tensors.items(), written.part_digests[1:], strict=True)
    }
    return {"file": written.entry, "chunks": chunks}
