"""Ranks forked from a server that has torch and transformers loaded: a run in seconds, where
torchrun pays the import of both in every rank. What a rank executes, and the environment it finds,
are torchrun's."""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from helpers.commands import REPOSITORY
from shardtune.config import Config
from shardtune.config_io import load_config
from shardtune.distributed.join import native_dtype
from shardtune.distributed.layout import Layout
from shardtune.distributed.meshes import Meshes
from shardtune.distributed.progress import Progress
from shardtune.distributed.world import World
from shardtune.training.observers.metrics import Metrics

_FORKS = multiprocessing.get_context("forkserver")
# By a name that is found from the root of the repository.
_FORKS.set_forkserver_preload(["tests.helpers.preloaded"])


def on_ranks(
    ranks: int,
    work: Callable[..., Any],
    *arguments: Any,
    cwd: Path,
    timeout_s: float = 500,
    grace_s: float = 0,
) -> subprocess.CompletedProcess[str]:
    """Run `work(*arguments)`, a function of a module, on every rank; as torchrun does, the first
    failure ends all: they get SIGTERM, and SIGKILL after `grace_s`.

    The exit code is that of this first failure, standard output is rank 0's, standard error that of
    all.
    """
    return on_nodes([(cwd, ranks)], work, *arguments, timeout_s=timeout_s, grace_s=grace_s)


def on_nodes(
    nodes: Sequence[tuple[Path, int]],
    work: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 500,
    grace_s: float = 0,
) -> subprocess.CompletedProcess[str]:
    """The same on several nodes: of each the folder in which its ranks run, and how many they are.

    A relative path, such as run.dir, then names something else on each node: its own disk.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [
        _environment(nodes, node, local, store.port)
        for node, (_, n) in enumerate(nodes)
        for local in range(n)
    ]
    folders = [folder for folder, n in nodes for _ in range(n)]
    logs = [folder / f"rank{rank}" for rank, folder in enumerate(folders)]
    started = [
        _FORKS.Process(target=_be_rank, args=(place, str(folder), str(log), work, arguments))
        for place, folder, log in zip(places, folders, logs, strict=True)
    ]
    with contextlib.chdir(REPOSITORY):
        forkserver.ensure_running()
    for log, process in zip(logs, started, strict=True):
        for suffix in (".out", ".err"):  # of a rank, too, that is ended before it opens them
            log.with_suffix(suffix).touch()
        process.start()
    deadline = time.monotonic() + timeout_s
    while running := [process for process in started if process.exitcode is None]:
        wait([process.sentinel for process in running], max(0, deadline - time.monotonic()))
        if any(process.exitcode for process in started) or time.monotonic() > deadline:
            break
    # Where several have ended, the one that was killed made the others fail.
    codes = sorted((process.exitcode or 0 for process in started), key=lambda code: code >= 0)
    code = next(filter(None, codes), 0)
    for process in running if grace_s else ():
        process.terminate()
    ended_by = time.monotonic() + grace_s
    for process in running:
        process.join(max(0, ended_by - time.monotonic()))
        process.kill()
        process.join()
    errors = "".join(log.with_suffix(".err").read_text(encoding="utf-8") for log in logs)
    assert code or not running, f"the ranks did not end within {timeout_s} s: {errors}"
    return subprocess.CompletedProcess(
        [], code, logs[0].with_suffix(".out").read_text(encoding="utf-8"), errors
    )


def train(ranks: int, *assignments: Any, cwd: Path, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run train_fsdp.py on forked ranks, with these `section.key=value` and the defaults for the
    rest. `work` runs it with something changed: it takes the arguments, as `run_script` does."""
    return train_on_nodes([(cwd, ranks)], *assignments, **how)


def train_on_nodes(
    nodes: Sequence[tuple[Path, int]],
    *assignments: Any,
    work: Callable[..., Any] | None = None,
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """The same on several nodes, see `on_nodes`."""
    for folder, _ in nodes:
        (folder / "config.yaml").touch()
    arguments = ["--config", "config.yaml", *map(str, assignments)]
    return on_nodes(nodes, work or run_script, arguments, **how)


def train_until(step: int, after_s: float, ranks: int, *assignments: Any, cwd: Path) -> None:
    """The same, and kill -9 of all ranks so many seconds after this step, whatever is being written
    then."""
    work = partial(_run_script_until, step, after_s)
    killed = train(ranks, *assignments, cwd=cwd, work=work)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


def train_each(runs: Sequence[tuple[int, Sequence[str]]], cwd: Path) -> None:
    """Run train_fsdp.py once for each (ranks, assignments), in turn, in processes forked once.

    The standard output of run i, its rank 0's, goes to `run<i>.out`.
    """
    (cwd / "config.yaml").touch()
    most = max(ranks for ranks, _ in runs)
    done = on_ranks(most, each_in_turn, list(runs), cwd=cwd, timeout_s=900)
    assert done.returncode == 0, done.stderr[-3000:]


def each_in_turn(runs: Sequence[tuple[int, Sequence[str]]]) -> None:
    script = str(REPOSITORY / "train_fsdp.py")
    rank = int(os.environ["RANK"])
    for number, (ranks, assignments) in enumerate(runs):
        if rank >= ranks:
            continue
        if rank == 0:
            os.dup2(os.open(f"run{number}.out", os.O_WRONLY | os.O_CREAT), 1)
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # its own part of the store
        sys.argv = [script, "--config", "config.yaml", *assignments]
        runpy.run_path(script)["main"]()
        dist.destroy_process_group()


def type_command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m shardtune` with these in a fork."""
    return on_ranks(1, _run_command, list(map(str, arguments)), cwd=cwd)


def config_for(model: Path, folder: Path, *assignments: str) -> Config:
    """The configuration of a run in `folder`, with its `train.jsonl`."""
    (folder / "config.yaml").touch()
    required = [f"model.path={model}", f"data.train={folder / 'train.jsonl'}"]
    return load_config(folder / "config.yaml", [*required, *assignments], {})


def run_script(arguments: list[str]) -> None:
    sys.argv = [str(REPOSITORY / "train_fsdp.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _run_command(arguments: list[str]) -> None:
    sys.argv = ["shardtune", *arguments]
    runpy.run_path(str(REPOSITORY / "shardtune/__main__.py"), run_name="__main__")


def _run_script_until(step: int, after_s: float, arguments: list[str]) -> None:
    write = Metrics.write

    def write_and_die(metrics: Metrics, *entries: Any) -> None:
        write(metrics, *entries)
        if [entry["step"] for entry in entries if entry["kind"] == "step"] == [step]:
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    Metrics.write = write_and_die
    run_script(arguments)


def _environment(
    nodes: Sequence[tuple[Path, int]], node: int, local_rank: int, port: int
) -> dict[str, str]:
    """What torchrun tells a rank."""
    sizes = [ranks for _, ranks in nodes]
    values = {
        "RANK": sum(sizes[:node]) + local_rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": node,
        "WORLD_SIZE": sum(sizes),
        "LOCAL_WORLD_SIZE": sizes[node],
        "GROUP_WORLD_SIZE": len(nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST"),  # not the server's
    }
    return {name: str(value) for name, value in values.items()}


def world_of(rank: int, size: int, store: dist.Store) -> World:
    """A rank, each a node of its own, that can agree with the others of the store, and do nothing
    else with them."""
    cpu = torch.device("cpu")
    return World(rank, Layout(size), 0, 1, rank, cpu, Meshes(cast(Any, None)), store, Progress(cpu))


def as_configured(world: World, config: Config) -> World:
    """Return the world of a run with another configuration, whose meshes are alike."""
    return replace(world, layout=Layout.of(config, world.size, False, native_dtype(world.device)))


def _be_rank(
    environment: dict[str, str],
    cwd: str,
    log: str,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    for stream, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(log + suffix, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # what a process that torchrun started has
    os.chdir(cwd)
    work(*arguments)
