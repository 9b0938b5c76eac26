"""Saving while training goes on: the loop waits for a copy of its tensors, a thread writes the copy and commits it."""

from __future__ import annotations

import json
import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
import transformers
import xxhash
from transformers import PreTrainedModel

from shardtune.checkpoint.commit import NotSaved, SaveAttempt, channel, forget, write_and_commit
from shardtune.checkpoint.manifest import (
    FORMAT,
    Checkpoint,
    checkpoint_name,
    dtype_name,
    find_committed,
    open_checkpoint,
    rank_file,
)
from shardtune.checkpoint.plan import Part, plan_save
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.safetensors_writer import write_safetensors
from shardtune.checkpoint.train_state import local, random_state, training_state
from shardtune.config import CheckpointConfig
from shardtune.distributed.signals import remark_on_kill_delay
from shardtune.distributed.world import World
from shardtune.errors import AGAIN, RunFailed
from shardtune.log import logger, node_logger

_STUCK_AFTER_S = 90  # past the deadline, by when every attempt has ended whose disk still answers


class Saver:
    """The checkpoints of one run. One save is in flight at most; every rank calls every method.

    `assets` are the files beside the tensors that make the checkpoint a model: configuration and tokenizer.
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
        self._directory = run_dir.path / "checkpoints"
        self._leader_of = run_dir.leader_of
        self._config, self._timeout_s, self._assets, self._world = config, timeout_s, assets, world
        self._tensors = training_state(model, optimizer)
        self._tied = dict(model.all_tied_weights_keys)
        self._parts = plan_save(self._tensors, world)
        self._places = world.all_gather_json(
            {"node": world.node_rank, "host": socket.gethostname()}
        )
        self._run = world.on_rank0(lambda: secrets.token_hex(4))
        self._store = dist.PrefixStore(self._run, channel(world))
        self._attempts = 0
        self._flight: SaveTask | None = None
        self._name = ""
        self._problem: str | None = None
        self._longest_s = 0.0
        self._is_warned = False

    @property
    def has_saved(self) -> bool:
        """Whether this run's directory holds a checkpoint to resume from."""
        return bool(find_committed(self._directory))

    def save(self, state: dict[str, Any], before: Callable[[], None] = lambda: None) -> None:
        """Start `checkpoint_<state["step"]>` when the one before has ended; with mode `sync`, end it too.

        `before` makes durable, on this rank, what must not be behind the checkpoint. What does not succeed is said, and
        training goes on.
        """
        self._wait()
        if not self._is_warned and (remark := remark_on_kill_delay(self._longest_s)):
            self._is_warned = True
            logger.info(remark)
        self._name = name = checkpoint_name(state["step"])
        if self._flight:
            logger.info(f"Not saved: {name}: the save before it has not ended, {self._problem}")
            return
        if self._world.is_main and self._attempts:
            forget(dist.PrefixStore(f"{self._attempts}", self._store), self._world.size)
        self._attempts += 1
        attempt = SaveAttempt(
            hidden=self._directory / f".{name}.{self._run}{self._attempts:04d}",
            final=self._directory / name,
            rank=self._world.rank,
            leader_of=self._leader_of,
            keep=self._config.keep,
            assets=self._assets,
            store=dist.PrefixStore(f"{self._attempts}", self._store),
            timeout_s=self._timeout_s,
        )
        self._flight = SaveTask(self, attempt, *self._stage(), state, before)
        self._flight.start()
        if self._config.mode == "sync":
            self._wait()

    def log_if_ended(self) -> None:
        """Log the outcome of the save in flight if it has ended."""
        if self._flight and not self._flight.is_alive():
            self._flight.log_once(self._world)

    def finish(self) -> Checkpoint:
        """Wait for the save in flight, and open it.

        Raises:
            RunFailed: on every rank, if it did not succeed.
        """
        self._wait()
        if self._problem:
            raise RunFailed(
                f"{self._name} was not saved: {self._problem} - make room or mend the disk; {AGAIN}"
            )
        checkpoint = open_checkpoint(self._directory / self._name)
        holders = {
            file: [self._leader_of[entry["rank"]]] for file, entry in checkpoint.files.items()
        }
        return replace(checkpoint, holders=holders)

    def _wait(self) -> None:
        """Wait until the save in flight has ended on every rank, and say how.

        Raises:
            RunFailed: on every rank, if it still writes the tensors of the run long after its deadline.
        """
        flight = self._flight
        if flight is None:
            return
        flight.join(self._timeout_s + _STUCK_AFTER_S)
        reports = self._world.all_gather_json(
            None if flight.is_alive() else [flight.problem, flight.seconds]
        )
        if stuck := [rank for rank, report in enumerate(reports) if report is None]:
            self._problem = f"the disk of rank {stuck[0]} does not answer"
            if (
                self._config.mode == "sync"
            ):  # what it writes, when it does, are the tensors of the run
                raise RunFailed(
                    f"{self._name} was not saved: {self._problem}, and checkpoint.mode=sync cannot go on meanwhile - "
                    f"mend the disk; {AGAIN}"
                )
            return
        flight.log_once(self._world)
        self._flight = None
        self._longest_s = max(self._longest_s, *(seconds for _, seconds in reports))
        self._problem = next((problem for problem, _ in reports if problem), None)

    def _stage(self) -> tuple[dict[str, torch.Tensor], dict[str, Part]]:
        """What this rank writes: copies on the CPU that nothing else holds, or for `sync` the tensors themselves."""
        parts = {part.tensor: part for part in self._parts[self._world.rank]}
        tensors = {name: local(self._tensors[name]).detach() for name in parts}
        if self._config.mode == "async":
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        for name, tensor in random_state(self._world.rank, self._world.device).items():
            tensors[name], parts[name] = tensor, Part(name, (0,), tuple(tensor.shape))
        return tensors, parts

    def manifest(self, reports: list[dict[str, Any]], state: dict[str, Any]) -> dict[str, Any]:
        """What rank 0 writes of all ranks' reports.

        Raises:
            ValueError: the chunks do not cover a tensor.
        """
        tensors: dict[str, Any] = {
            name: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "chunks": []}
            for name, tensor in self._tensors.items()
        }
        for report in reports:
            for name, chunk in report["chunks"].items():
                own = {
                    "dtype": chunk.pop("dtype"),
                    "shape": chunk["sizes"],
                    "chunks": [],
                }  # of a rank's own tensor
                tensors.setdefault(name, own)["chunks"].append(chunk)
        for name, tensor in tensors.items():
            covered = sum(torch.Size(chunk["sizes"]).numel() for chunk in tensor["chunks"])
            if covered != torch.Size(tensor["shape"]).numel():
                raise ValueError(
                    f"{covered} elements of {name}, which is {tensor['shape']}, were written"
                )
        files = {
            report["file"]: report["written"] | {"rank": rank} | self._places[rank]
            for rank, report in enumerate(reports)
        }
        files |= {
            name: asset | {"rank": 0} | self._places[0]
            for name, asset in reports[0]["assets"].items()
        }
        return {
            "format": FORMAT,
            "state": state,
            "config_xxh3_128": xxhash.xxh3_128(
                json.dumps(state["config"], sort_keys=True).encode()
            ).hexdigest(),
            "world": {
                "size": self._world.size,
                "mesh": dict(
                    zip(self._world.mesh.mesh_dim_names or (), self._world.mesh.shape, strict=True)
                ),
                "nodes": [place["node"] for place in self._places],
            },
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "safetensors": safetensors.__version__,
            },
            "files": files,
            "tensors": tensors,
            "tied_weights": self._tied,  # each name that is not stored, and the stored one that is the same weight
        }


class SaveTask(threading.Thread):
    """One save of this rank, from its staged tensors to its outcome."""

    def __init__(
        self,
        saver: Saver,
        attempt: SaveAttempt,
        tensors: dict[str, torch.Tensor],
        parts: dict[str, Part],
        state: dict[str, Any],
        before: Callable[[], None],
    ) -> None:
        super().__init__(name=f"save {attempt.final.name}", daemon=True)
        self.attempt = attempt
        self.problem: str | None = None
        self.seconds = 0.0
        self._saver, self._tensors, self._parts, self._state, self._before = (
            saver,
            tensors,
            parts,
            state,
            before,
        )
        self._remark: str | None = None
        self._is_logged = False

    def run(self) -> None:
        started = time.monotonic()
        try:
            self._remark = write_and_commit(
                self.attempt,
                self._write,
                lambda reports: self._saver.manifest(reports, self._state),
            )
        except NotSaved as error:
            self.problem = str(error)
        except Exception as error:
            self.problem = f"rank {self.attempt.rank} on {socket.gethostname()}: {type(error).__name__}: {error}"
        self._tensors.clear()
        self.seconds = time.monotonic() - started

    def log_once(self, world: World) -> None:
        if self._is_logged:
            return
        self._is_logged = True
        name = self.attempt.final.name
        if self.problem:
            node_logger.info(f"Not saved: {name}: {self.problem}")
        else:
            logger.info(f"Saved {name}")
        if self._remark:
            node_logger.info(self._remark)

    def _write(self, directory: Path) -> dict[str, Any]:
        """This rank's file; what rank 0 must know of it."""
        self._before()
        names = sorted(self._tensors, key=lambda name: (-self._tensors[name].itemsize, name))
        offsets = {name: {"saved_offsets": self._parts[name].offsets} for name in names}
        file = rank_file(self.attempt.rank)
        written, ranges = write_safetensors(
            directory / file,
            {name: (self._tensors[name].dtype, self._parts[name].sizes) for name in names},
            (self._tensors[name].cpu() for name in names),
            {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)},
        )
        chunks = {
            name: {
                "offsets": self._parts[name].offsets,
                "sizes": self._parts[name].sizes,
                "file": file,
                "begin": ranges[name][0],
                "end": ranges[name][1],
                "xxh3_128": digest,
                "dtype": dtype_name(self._tensors[name].dtype),
            }
            for name, digest in zip(names, written.parts[1:], strict=True)
        }
        return {
            "file": file,
            "written": {"bytes": written.bytes, "xxh3_128": written.xxh3_128},
            "chunks": chunks,
        }
