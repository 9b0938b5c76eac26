"""The processes of one run: who they are, how they agree, and how they end."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import io
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardtune.config import DistributedConfig
from shardtune.distributed.progress import Progress
from shardtune.distributed.signals import end_on_signal, end_with_torchrun, ignore_signals
from shardtune.distributed.store import delete_value, get_value, set_value, wait_for
from shardtune.distributed.watchdog import (
    FIRST_STEP_TIMEOUT_S,
    Peer,
    Watchdog,
    fail_for,
    leave_last_word,
    tell_launcher,
)
from shardtune.errors import AGAIN, Aborted, OutOfMemory, Preempted, RunFailed, UserError

T = TypeVar("T")

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Tokenising or reading a large input may take hours on one node while the others wait for it. A process that dies
# meanwhile is noticed by its launcher, not by this wait.
_AGREE_TIMEOUT_S = 2 * 24 * 3600.0
_OTHERS_REFUSE_WITHIN_S = 20.0
_FIRST_RANK_SPEAKS_S = 10
_TELL_S = 5
_REFUSED_KEY = "refused"
_JOINING = (
    threading.Event()
)  # set once this process has looked for the others: then they know of it
_WATCHDOG_SPEAKS_S = 60  # before a collective's own timeout, which knows no names
_watchdogs: list[Watchdog] = []  # this process's, once it has joined


@dataclass(frozen=True)
class World:
    """One process's place in the run. `mesh` holds every rank, in a dimension `shard`, behind `replicate` if there are
    several copies."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    device: torch.device
    mesh: DeviceMesh
    store: dist.Store
    progress: Progress
    _round: count[int] = field(default_factory=count)

    @property
    def replicas(self) -> int:
        """How many copies of the sharded model there are."""
        return self.size // self.mesh["shard"].size()

    @property
    def node_name(self) -> str:
        return f"node {self.node_rank} ({socket.gethostname()})"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_node_main(self) -> bool:
        return self.local_rank == 0

    def all_gather_json(self, value: Any, timeout_s: float = _AGREE_TIMEOUT_S) -> list[Any]:
        """Every rank's JSON-able `value`, in rank order, on every rank.

        It goes through the store, not through a collective: a rank may arrive hours after another.

        Raises:
            TimeoutError: some have not come within `timeout_s` seconds.
        """
        self.progress.arrive()
        number = next(self._round)
        keys = [f"gather/{number}/{rank}" for rank in range(self.size)]
        set_value(self.store, keys[self.rank], value)
        wait_for(self.store, keys, timeout_s)
        # Who has come to this round has read the one before.
        delete_value(self.store, f"gather/{number - 1}/{self.rank}")
        return [get_value(self.store, key) for key in keys]

    def limit_steps(self, timeout_s: float) -> None:
        """From now on the run ends when no rank moves for so long within a step too, naming the one that is behind.

        The collectives' own timeout, until now a long one for the first step, is the net below.
        """
        if _watchdogs and not _watchdogs[0].limits_steps:
            _watchdogs[0].limits_steps = True
            _set_collective_timeout(timeout_s + _WATCHDOG_SPEAKS_S, self.mesh)

    def all_gather_scalars(self, *values: torch.Tensor | float) -> torch.Tensor:
        """Every rank's scalars, float64 [ranks, values]: a collective. A host with a GPU does not wait for it."""
        # A tensor made from a number on the host, unlike one filled with it, would wait for the GPU.
        mine = [
            torch.full((), 1.0, dtype=torch.float64, device=self.device) * value for value in values
        ]
        gathered = mine[0].new_empty(self.size * len(mine))
        with self.progress.waiting():
            dist.all_gather_single(gathered, torch.stack(mine))
        return gathered.view(self.size, len(mine))

    def all_reduce_max(self, *values: float) -> list[float]:
        """The largest of each value over the ranks."""
        return self.all_gather_scalars(*values).amax(0).tolist()

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; its own result on each.

        A rank on which it fails in another way ends the run at once, and one that is alone in refusing soon: others
        may be hours from their end.

        Raises:
            UserError: on every rank, with the problems of all of them, each once and with the nodes that have it unless
                all do, if `work` refused on any.
            Aborted: `work` refused on this one, and others are still at it.
        """
        own: list[str] = []
        try:
            result = work()
        except UserError as refused:
            own = refused.problems
        try:
            reports = self.all_gather_json(
                [self.node_name, own], _OTHERS_REFUSE_WITHIN_S if own else _AGREE_TIMEOUT_S
            )
        except TimeoutError as late:
            for problem in own[:-1]:
                print(f"ERROR: {problem}", file=sys.stderr, flush=True)
            raise Aborted(own[-1], code=2) from late
        nodes = dict.fromkeys(name for name, _ in reports)
        problems = dict.fromkeys(problem for _, of_rank in reports for problem in of_rank)
        having = {
            problem: dict.fromkeys(name for name, of_rank in reports if problem in of_rank)
            for problem in problems
        }
        if problems:
            raise UserError(
                *(
                    f"{', '.join(names)}: {p}" if names != nodes else p
                    for p, names in having.items()
                )
            )
        return result

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0; its JSON-able result on every rank. Raises as `agree` does."""
        result = self.run_on_all_ranks(lambda: work() if self.is_main else None)
        return cast(T, self.all_gather_json(result)[0])

    def on_local_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` in one process of each node; its JSON-able result on all ranks of it. Raises as `agree` does."""
        result = self.run_on_all_ranks(lambda: work() if self.is_node_main else None)
        reports = self.all_gather_json([self.node_rank, self.is_node_main, result])
        return cast(
            T,
            next(
                value
                for node, is_node_main, value in reports
                if is_node_main and node == self.node_rank
            ),
        )


def join_world(config: DistributedConfig, replicate: int = 1) -> World:
    """Meet the other processes that torchrun or accelerate started; without a launcher, a world of one.

    The ranks make up `replicate` groups of consecutive ranks, each of which shards a whole copy of the model. From then
    on this process ends, and says why, when another rank fails, stops or is gone.

    Raises:
        UserError: the launcher's environment is incomplete, the GPUs do not suffice, `replicate` does not divide the
            ranks, or not everyone came in time.
    """
    missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
    if 0 < len(missing) < len(_LAUNCHER_VARIABLES) and (
        "RANK" in os.environ or "WORLD_SIZE" in os.environ
    ):
        raise UserError(
            f"the environment sets only some of a launcher's variables, {', '.join(missing)} not - "
            "start with torchrun, or unset RANK and WORLD_SIZE for one process"
        )
    alone = bool(missing)
    rank, size, local_rank = (
        (0, 1, 0) if alone else map(_variable, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    )
    local_size = 1 if alone else _variable("LOCAL_WORLD_SIZE", size)
    node_rank = 0 if alone else _variable("GROUP_RANK", rank // local_size)
    faulthandler.enable()  # a crash in native code leaves its stack
    device, backend = _device_and_backend(config.backend, local_rank)
    if size % replicate:
        raise UserError(
            f"parallel.replicate={replicate} does not divide the world size, {size} - use a number that does"
        )
    timeout = datetime.timedelta(seconds=config.join_timeout_s)
    progress = Progress(device)
    store: dist.Store
    _JOINING.set()
    try:
        if alone:
            store = dist.HashStore()
        else:
            store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
            store = _meet(store, rank, size, config.join_timeout_s)
            _watch_others(store, rank, size, node_rank, progress, config)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_pg", store),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"rank {rank} of {size} did not meet the others at {address} within {config.join_timeout_s} s "
            f"({str(error).splitlines()[0]}) - start every node within that time, with one MASTER_ADDR and "
            "MASTER_PORT that all of them reach"
        ) from error
    shape = (
        {"replicate": replicate, "shard": size // replicate} if replicate > 1 else {"shard": size}
    )
    mesh = dist.init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    _set_collective_timeout(
        max(FIRST_STEP_TIMEOUT_S, config.step_timeout_s) + _WATCHDOG_SPEAKS_S, mesh
    )
    store = dist.PrefixStore("shardtune", store)
    return World(rank, size, local_rank, local_size, node_rank, device, mesh, store, progress)


def _set_collective_timeout(timeout_s: float, mesh: DeviceMesh) -> None:
    """Of every process group; PyTorch has no public name for it, and its trainers use this one."""
    for group in (None, *mesh.get_all_groups()):
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)


def _meet(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.Store:
    """A part of the store for these processes alone, when every rank has come.

    torchrun keeps its store when it starts the ranks again, with all that the last ones left there, and nodes may count
    the restarts differently. So rank 0 names the attempt and who it has seen, until each has found itself there.

    Raises:
        UserError: some did not come in time, or one was refused before it came (see `_tell_the_others`).
    """
    me = secrets.token_hex(8)
    store.set(f"hello/{rank}", me)
    attempt: dict[str, Any] = {"seen": []}
    deadline, pause_s = time.monotonic() + timeout_s, 0.01
    while True:
        if rank == 0:
            seen = [
                store.get(key).decode() if store.check([key]) else ""
                for key in _keys("hello", size)
            ]
            if seen != attempt["seen"]:
                store.set("attempt", json.dumps({"id": secrets.token_hex(8), "seen": seen}))
        if store.check(["attempt"]):
            attempt = json.loads(store.get("attempt"))
            if attempt["seen"][rank : rank + 1] == [me]:
                own = dist.PrefixStore(attempt["id"], store)
                own.set(f"here/{rank}", "")
                if own.check(_keys("here", size)):
                    return own
        if store.check([_REFUSED_KEY]):
            raise UserError(*json.loads(store.get(_REFUSED_KEY)))
        if time.monotonic() > deadline:
            late = [r for r, key in enumerate(_keys("hello", size)) if not store.check([key])]
            raise UserError(
                f"rank {_named(late) or 'that was started again'} of {size} did not come within {timeout_s} s - start "
                "every node within that time, and look at the logs of those that did not come"
            )
        time.sleep(pause_s)
        pause_s = min(0.2, 1.5 * pause_s)


def _watch_others(
    store: dist.Store,
    rank: int,
    size: int,
    node_rank: int,
    progress: Progress,
    config: DistributedConfig,
) -> None:
    """Start the watchdog when all ranks have made theirs."""
    if size == 1:
        return
    set_value(store, f"peer/{rank}", [node_rank, socket.gethostname(), os.getpid()])
    wait_for(store, _keys("peer", size), config.join_timeout_s)
    peers = [Peer(other, *get_value(store, key)) for other, key in enumerate(_keys("peer", size))]
    watchdog = Watchdog(rank, peers, store, progress, config.step_timeout_s, config.save_timeout_s)
    store.set(f"watching/{rank}", "")
    wait_for(store, _keys("watching", size), config.join_timeout_s)
    watchdog.start()
    _watchdogs.append(watchdog)  # a main thread that ends relies on its threads


def _keys(name: str, size: int) -> list[str]:
    return [f"{name}/{rank}" for rank in range(size)]


def _tell_the_others(problems: list[str]) -> None:
    """Leave in the store why this process, which has not joined, never will, for the nodes that wait for it."""
    if _JOINING.is_set() or any(name not in os.environ for name in _LAUNCHER_VARIABLES):
        return
    told = [
        f"node {os.environ.get('GROUP_RANK', '?')} ({socket.gethostname()}): {problem}"
        for problem in problems
    ]
    with contextlib.suppress(RuntimeError, ValueError):  # nobody may listen: then nobody waits
        store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=_TELL_S)))
        if not store.check([_REFUSED_KEY]):
            store.set(_REFUSED_KEY, json.dumps(told))


def speak_for(ranks: list[int], line: str) -> tuple[int, str]:
    """For the launcher of ranks that have ended without a word: tell the others. The run's exit code and last line.

    These are another rank's, if that one failed first.
    """
    with contextlib.suppress(RuntimeError):  # node 0 has ended, and nobody is to be told
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(
            *address, is_master=False, timeout=datetime.timedelta(seconds=_TELL_S)
        )
        attempt = json.loads(store.get("attempt"))
        failure = fail_for(
            ranks, len(attempt["seen"]), dist.PrefixStore(attempt["id"], store), line
        )
        return failure.code, failure.line
    return 1, line


def _named(ranks: list[int]) -> str:
    """The first few of some ranks."""
    return ", ".join(map(str, ranks[:8])) + (
        f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    )


def _variable(name: str, default: int | None = None) -> int:
    value = os.environ.get(name, default)
    try:
        return int(str(value))
    except ValueError as error:
        raise UserError(
            f"the environment has {name}={value}, which is no number - start with torchrun"
        ) from error


def _device_and_backend(backend: str, local_rank: int) -> tuple[torch.device, str]:
    """gloo always serves CPU tensors; nccl serves the GPUs' when there are any."""
    has_gpu = torch.cuda.is_available()
    if backend == "nccl" and not has_gpu:
        raise UserError(
            "distributed.backend is nccl and this node has no GPU - use distributed.backend=auto"
        )
    if backend == "gloo" or not has_gpu:
        return torch.device("cpu"), "gloo"
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU, this node has {torch.cuda.device_count()} - "
            "start at most one process per GPU (--nproc_per_node, GPUS_PER_NODE)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device, "cpu:gloo,cuda:nccl"


def describe(world: World) -> str:
    """The `Training Configuration:` block of this node."""
    launched = (
        "RANK" in os.environ
    )  # without a launcher an address may be set all the same, and is not used
    master = (
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if launched
        else "none, a single process"
    )
    nodes = (
        -(-world.size // world.local_size)
        if "GROUP_WORLD_SIZE" not in os.environ
        else int(os.environ["GROUP_WORLD_SIZE"])
    )
    return "\n".join(
        (
            "",
            "Training Configuration:",
            f"  Hostname: {socket.gethostname()}",
            f"  World Size: {world.size}",
            f"  Number of Nodes: {nodes}",
            f"  GPUs per Node: {world.local_size}",
            f"  Master: {master}",
            "",
        )
    )


def run(main: Callable[[], None]) -> None:
    """Run `main` and end the process with the exit code that the outcome has: 0, 2, 75 or 1 (see errors).

    The last line on stderr of a failure is `ERROR: ...`; what all ranks share is printed once a node. The launch
    scripts, from which torchrun hides the code, name a folder for it in SHARDTUNE_LAUNCH_DIR.
    """
    for stream in (sys.stdout, sys.stderr):
        cast(io.TextIOWrapper, stream).reconfigure(
            errors="backslashreplace"
        )  # a name may have what a terminal lacks
    end_with_torchrun()
    end_on_signal(
        "before the first step, with nothing to save - run the same command again", code=1
    )
    tell_launcher("processes", f"{os.getpid()}\n")
    is_shared = False
    try:
        main()
    except UserError as refused:
        code, lines, is_shared = 2, refused.problems, True
        if _is_of_a_connection(refused.__cause__):  # to a rank that may have ended
            (code, lines), is_shared = _first_failure(2, lines[0], may_be_innocent=True), False
    except Preempted as interrupted:
        code, lines, is_shared = 75, [str(interrupted)], True
    except RunFailed as stopped:
        code, lines, is_shared = 1, [str(stopped)], True
    except Aborted as ended:
        code, lines = _first_failure(ended.code, str(ended), may_be_innocent=False)
        if not _watchdogs and os.environ.get("LOCAL_RANK", "0") != "0":
            lines = []  # the others of this node have had the signal too, and the first one speaks
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not dist.is_initialized():
            raise
        with contextlib.suppress(OSError):
            traceback.print_exc()
        code, lines = _first_failure(1, _failure(error), may_be_innocent=_is_of_a_connection(error))
    else:
        code, lines = 0, []
    ignore_signals()
    if lines and is_shared and os.environ.get("LOCAL_RANK", "0") != "0" and _await_first(code):
        lines = []
    if code == 2:
        _tell_the_others(lines)
    if lines and leave_last_word(code, lines[-1]):
        lines.pop()
    with contextlib.suppress(OSError):  # `tee` may have ended before
        for line in lines:
            print(f"ERROR: {line}", file=sys.stderr, flush=True)
    for watchdog in _watchdogs:
        watchdog.leave(code)
    if dist.is_initialized() and code == 0:
        dist.destroy_process_group()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # A failed rank must not wait in interpreter shutdown for collectives that will never complete.
    os._exit(code)


def _await_first(code: int) -> bool:
    """Whether the node's first rank has ended, and with it said what all share; this one does if that never does.

    Ending before it would have torchrun end it before it does; once it has ended, torchrun's signal ends this one,
    unless torchrun waits for all of them after a signal of its own.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for watchdog in _watchdogs:
        watchdog.leave(code)
    deadline = time.monotonic() + _FIRST_RANK_SPEAKS_S
    while time.monotonic() < deadline:
        if any(watchdog.first_has_ended for watchdog in _watchdogs):
            return True
        time.sleep(0.1)
    return False


def _first_failure(code: int, line: str, may_be_innocent: bool) -> tuple[int, list[str]]:
    """With what this rank ends that fails by itself: the code and the lines that it prints.

    They are another rank's, if that one failed first, and none, if another process of this node prints them.
    """
    ignore_signals()  # torchrun's, for instance, which ends this process because another one failed
    if not _watchdogs:
        return code, [line]
    watchdog = _watchdogs[0]
    me = str(watchdog.me)
    told = line if line.startswith(me) else f"{me}: {line}"
    failure = watchdog.settle(told, code, may_be_innocent)
    if failure.line == told:
        return code, [line]
    return failure.code, [failure.line] if watchdog.speaks(failure) else []


def _is_of_a_connection(error: BaseException | None) -> bool:
    """Whether it is what a rank gets when another is gone."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "/gloo/" in str(error)
    )


def _failure(error: BaseException) -> str:
    said = (str(error).splitlines() or [""])[0].partition(" This is typically caused by")[
        0
    ]  # gloo's guesses
    what, remedy = (
        f"{type(error).__name__}: {said}".removesuffix(": "),
        f"see the traceback there; {AGAIN}",
    )
    if isinstance(error, OutOfMemory):  # the same command again would end like this
        what, _, remedy = str(error).partition(" - ")
    place = f", in {_watchdogs[0].place}" if _watchdogs else ""
    return f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}: {what}{place} - {remedy}"
