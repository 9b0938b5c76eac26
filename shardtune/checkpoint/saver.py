"""Save while training continues: the loop waits for a copy of its tensors, a thread writes it."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from shardtune.checkpoint.commit import (
    SaveAttempt,
    connect_store,
    delete_messages,
    write_and_commit,
)
from shardtune.checkpoint.manifest import (
    Checkpoint,
    build_manifest,
    checkpoint_name,
    open_checkpoint,
    rank_file,
)
from shardtune.checkpoint.plan import TensorPart, plan_save
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.safetensors_writer import write_safetensors
from shardtune.checkpoint.train_state import random_state, training_state
from shardtune.config import CheckpointConfig
from shardtune.distributed.tensors import dtype_name, to_local
from shardtune.distributed.world import World
from shardtune.errors import AGAIN, RunFailed
from shardtune.log import logger, node_logger

_STUCK_AFTER_S = 90  # past the deadline; by then every attempt has ended whose disk still answers


class Saver:
    """Saves the checkpoints of one run, at most one at a time. Every method is collective.

    `assets` are the files beside the tensors that make a checkpoint a model: configuration and
    tokenizer.
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
        self._tied_weights = dict(model.all_tied_weights_keys)
        self._parts = plan_save(self._tensors, world)
        host = {"node": world.node_rank, "host": socket.gethostname()}
        self._hosts = world.all_gather_json(host)
        self._run_id = world.on_rank0(lambda: secrets.token_hex(4))
        self._store = dist.PrefixStore(self._run_id, connect_store(world))
        self._attempts = 0
        self._task: SaveTask | None = None
        self._name = ""
        self._problem: str | None = None

    def save(self, state: dict[str, Any], before_write: Callable[[], None] = lambda: None) -> None:
        """Start `checkpoint_<state["step"]>` after the previous save; with mode `sync`, finish it.

        `before_write` makes the files of this rank durable that must not lag behind the checkpoint.
        A save that fails is logged, and training continues.
        """
        self._wait()
        self._name = name = checkpoint_name(state["step"])
        if self._task:
            logger.info(f"Not saved: {name}: the previous save still runs, {self._problem}")
            return
        if self._world.is_main and self._attempts:
            delete_messages(dist.PrefixStore(f"{self._attempts}", self._store), self._world.size)
        self._attempts += 1
        directory = self._run_dir.checkpoints
        attempt = SaveAttempt(
            staging=directory / f".{name}.{self._run_id}{self._attempts:04d}",
            final=directory / name,
            rank=self._world.rank,
            leader_of=self._run_dir.leader_of,
            keep=self._config.keep,
            assets=self._assets,
            store=dist.PrefixStore(f"{self._attempts}", self._store),
            timeout_s=self._timeout_s,
        )
        tensors, parts = self._stage()

        def write(directory: Path) -> dict[str, Any]:
            before_write()
            return _write_rank_file(directory / rank_file(self._world.rank), tensors, parts)

        describe = partial(
            build_manifest,
            tensors=self._tensors,
            tied_weights=self._tied_weights,
            state=state,
            hosts=self._hosts,
            world=self._world,
        )
        self._task = SaveTask(attempt, write, describe)
        self._task.start()
        if self._config.mode == "sync":
            self._wait()

    def log_if_ended(self) -> None:
        """Log the outcome of the current save if it has ended."""
        if self._task and not self._task.is_alive():
            self._task.log_once()

    def finish(self) -> Checkpoint:
        """Wait for the current save, and open it.

        Raises:
            RunFailed: on every rank, if it did not succeed.
        """
        self._wait()
        if self._problem:
            raise RunFailed(
                f"{self._name} was not saved: {self._problem} - make room or mend the disk; {AGAIN}"
            )
        checkpoint = open_checkpoint(self._run_dir.checkpoints / self._name)
        leader_of = self._run_dir.leader_of
        holders = {name: [leader_of[file["rank"]]] for name, file in checkpoint.files.items()}
        return replace(checkpoint, holders=holders)

    def _wait(self) -> None:
        """Wait until the current save has ended on every rank, and log its outcome.

        Raises:
            RunFailed: on every rank, if it still writes the run's own tensors long after its
                deadline.
        """
        task = self._task
        if task is None:
            return
        task.join(self._timeout_s + _STUCK_AFTER_S)
        outcome = None if task.is_alive() else [task.problem]
        outcomes = self._world.all_gather_json(outcome)
        if None in outcomes:
            self._problem = f"the disk of rank {outcomes.index(None)} does not answer"
            if self._config.mode == "sync":  # it would write weights of later steps
                raise RunFailed(
                    f"{self._name} was not saved: {self._problem}, and checkpoint.mode=sync cannot "
                    f"continue meanwhile - mend the disk; {AGAIN}"
                )
            return
        task.log_once()
        self._task = None
        self._problem = next((problem for [problem] in outcomes if problem), None)

    def _stage(self) -> tuple[dict[str, torch.Tensor], dict[str, TensorPart]]:
        """Return this rank's tensors and their places, wide dtypes first.

        The tensors are copies on the CPU, or with mode `sync` the run's own.
        """
        parts = {part.tensor: part for part in self._parts[self._world.rank]}
        tensors = {name: to_local(self._tensors[name]).detach() for name in parts}
        if self._config.mode == "async":
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        for name, tensor in random_state(self._world.rank, self._world.device).items():
            tensors[name], parts[name] = tensor, TensorPart(name, (0,), tuple(tensor.shape))
        names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
        return {name: tensors[name] for name in names}, parts


class SaveTask(threading.Thread):
    """One save of this rank, from its staged tensors to its outcome."""

    def __init__(
        self,
        attempt: SaveAttempt,
        write: Callable[[Path], dict[str, Any]],
        build_manifest: Callable[[list[dict[str, Any]]], dict[str, Any]],
    ) -> None:
        # The arguments hold the copied tensors; Thread drops them when it ends.
        name = attempt.final.name
        super().__init__(
            name=name, daemon=True, target=self._save, args=(attempt, write, build_manifest)
        )
        self.problem: str | None = None
        self._remark: str | None = None
        self._is_logged = False

    def _save(self, attempt: SaveAttempt, *work: Any) -> None:
        try:
            self._remark = write_and_commit(attempt, *work)
        except Exception as error:
            self.problem = attempt.describe(error)

    def log_once(self) -> None:
        """Log the outcome, unless this was done before."""
        if self._is_logged:
            return
        self._is_logged = True
        if self.problem:
            node_logger.info(f"Not saved: {self.name}: {self.problem}")
        else:
            logger.info(f"Saved {self.name}")
        if self._remark:
            node_logger.info(self._remark)


def _write_rank_file(
    path: Path, tensors: Mapping[str, torch.Tensor], parts: Mapping[str, TensorPart]
) -> dict[str, Any]:
    """Write a rank's file, and return its report: the file's entry and its chunks.

    Its header lets torch.distributed.checkpoint's HuggingFaceStorageReader read it.
    """
    offsets = {name: {"saved_offsets": parts[name].offsets} for name in tensors}
    written, ranges = write_safetensors(
        path,
        {name: (tensor.dtype, parts[name].sizes) for name, tensor in tensors.items()},
        (tensor.cpu() for tensor in tensors.values()),
        {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)},
    )
    chunks = {
        name: {
            "offsets": parts[name].offsets,
            "sizes": parts[name].sizes,
            "file": path.name,
            "begin": ranges[name][0],
            "end": ranges[name][1],
            "xxh3_128": digest,
            "dtype": dtype_name(tensor.dtype),
        }
        for (name, tensor), digest in zip(tensors.items(), written.part_digests[1:], strict=True)
    }
    return {"file": written.entry, "chunks": chunks}
