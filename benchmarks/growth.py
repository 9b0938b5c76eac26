"""Write the table of docs/planner.md anew that counts what grows with the nodes of a run.

The functions of a run do the work of all nodes in one process, each node with 8 ranks and a disk of
its own. Nothing is timed. Looks at the store that wait for a value are not counted.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from transformers import AutoConfig

from benchmarks.plans import CONFIGS, PAGE
from shardtune.checkpoint import commit, saver
from shardtune.checkpoint.manifest import build_manifest, rank_file
from shardtune.cluster import connectivity, judge
from shardtune.cluster.control import LONGEST_BYTES, Control, NodeHello, Peer
from shardtune.cluster.stuck import RankStatus
from shardtune.data.schedule import rows_of_rank
from shardtune.distributed.layout import Layout
from shardtune.distributed.meshes import Meshes
from shardtune.distributed.progress import Progress
from shardtune.distributed.world import World
from shardtune.model.source.text_model import build_text_model

NODES, RANKS_PER_NODE = (2, 16, 64), 8
FACTS_BYTES = 20_000  # of a node's facts, of which digests of the code are the most
TABLE = re.compile(r"(<!-- growth -->\n\n\|.*\n\|.*\n)((?:\|.*\n)+)")


def add_options(parser: ArgumentParser) -> None:
    """Add no options."""


def main(_: Namespace) -> None:
    columns = [count(nodes) for nodes in NODES]
    rows = [f"| {what} | {' | '.join(each[what] for each in columns)} |\n" for what in columns[0]]
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda match: match[1] + "".join(rows), text), encoding="utf-8")


def count(nodes: int) -> dict[str, str]:
    """Return the cells of a column, by the names of their rows."""
    ranks = nodes * RANKS_PER_NODE
    with tempfile.TemporaryDirectory() as folder:
        entries, manifest_bytes = _manifest(ranks, Path(folder))
        requests, files = _commit(ranks, Path(folder))
    costs = np.arange(Layout(ranks, micro_batches=4).rows_per_step)
    own_rows = sum(map(len, rows_of_rank(costs, 0, ranks, 1)))
    messages, sent_bytes, reports, seen = asyncio.run(_agents(nodes))
    numbers = {
        "preflight: messages of node 0": messages,
        "preflight: MB of these": sent_bytes / 1e6,
        "preflight: paths tried": nodes * asyncio.run(_paths(nodes)),
        "a second: messages to node 0": reports,
        "a second: ranks that it looks at": seen,
        "store: requests of an agreement (a start has 60)": _agree(ranks),
        "store: requests of a commit": requests,
        "schedule: rows of a step (4 micro-batches)": len(costs),
        "schedule: of these a rank's own": own_rows,
        "manifest (Llama 3 8B): entries": entries,
        "manifest (Llama 3 8B): MB": manifest_bytes / 1e6,
        "checkpoint: files": files,
    }
    return {
        what: f"{number:,}" if isinstance(number, int) else f"{number:.3g}"
        for what, number in numbers.items()
    }


class Store:
    """Holds values as the launcher's store does, and counts how many are written and read."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self.requests: list[str] = []  # threads append at the same time

    def set(self, key: str, value: Any) -> None:
        self.requests.append(key)
        self._values[key] = value

    def get(self, key: str) -> Any:
        self.requests.append(key)
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> None:
        self._values.pop(key, None)


def _on_ranks(ranks: int, work: Callable[[Store, int], object]) -> int:
    """Do the work of each rank in a thread; return the number of requests to their store."""
    store = Store()
    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(partial(work, store), range(ranks)))
    return len(store.requests)


def _agree(ranks: int) -> int:
    cpu = torch.device("cpu")
    alone: Any = Meshes(cast(Any, None)), Progress(cpu)

    def agree(store: Store, rank: int) -> None:
        meshes, progress = alone
        shared: Any = store
        World(rank, Layout(ranks), 0, 1, 0, cpu, meshes, shared, progress).all_gather_json(rank)

    return _on_ranks(ranks, agree)


def _commit(ranks: int, folder: Path) -> tuple[int, int]:
    leader_of = [rank - rank % RANKS_PER_NODE for rank in range(ranks)]

    def manifest(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
        files = enumerate(reports)
        return {"files": {rank_file(rank): {**file, "rank": rank} for rank, file in files}}

    def save(store: Store, rank: int) -> None:
        def write(directory: Path) -> dict[str, Any]:
            (directory / rank_file(rank)).touch()
            return {"bytes": 0}

        disk = folder / f"disk{leader_of[rank]}"
        disk.mkdir(exist_ok=True)
        paths = disk / ".staging", disk / "checkpoint_0000001"
        attempt = commit.SaveAttempt(*paths, rank, leader_of, 1, {}, 0, cast(Any, store), 600)
        commit.write_and_commit(attempt, write, manifest)

    requests = _on_ranks(ranks, save)
    return requests, len(list(folder.glob("disk*/checkpoint_*/*")))


def _manifest(ranks: int, folder: Path) -> tuple[int, int]:
    with torch.device("meta"):
        model = build_text_model(AutoConfig.from_pretrained(CONFIGS / "llama-3-8b"))
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    names = [f"{kind}.{name}" for kind in kinds for name, _ in model.named_parameters()]
    slices = {name: torch.zeros(1, 4) for name in names}  # a row for each rank
    offsets = dict.fromkeys(names, (0, 0))
    report = saver._write_rank_file(folder / rank_file(0), slices, offsets)

    def report_of(rank: int) -> dict[str, Any]:
        place = {"offsets": [rank, 0], "file": rank_file(rank)}
        chunks = {name: {**chunk, **place} for name, chunk in report["chunks"].items()}
        return {**report, "chunks": chunks, "assets": {}}

    whole = {name: ("float32", [ranks, 4]) for name in names}
    hosts = [{"node": r // RANKS_PER_NODE, "host": "host"} for r in range(ranks)]
    mesh = SimpleNamespace(mesh_dim_names=("shard",), shape=(ranks,))
    world: Any = SimpleNamespace(size=ranks, mesh=mesh)
    reports, state = [report_of(rank) for rank in range(ranks)], {"step": 1, "config": {}}
    manifest = build_manifest(reports, whole, {}, state, hosts, world)
    entries = sum(len(entry["chunks"]) for entry in manifest["tensors"].values())
    return entries, len(json.dumps(manifest))


class Wire:
    """The way of messages from one agent to another, which lists those that are no sign of life."""

    def __init__(self, reader: asyncio.StreamReader, sent: list[bytes]) -> None:
        self._reader, self._sent = reader, sent

    def write(self, data: bytes) -> None:
        if data != b"\n" and b'"alive"' not in data:
            self._sent.append(data)
        self._reader.feed_data(data)

    def get_extra_info(self, _: str) -> None:
        return None


def _hello(node: int, nodes: int) -> NodeHello:
    return NodeHello(node=node, nodes=nodes, host=f"node{node}", address="-", code="0", problems=[])


async def _agents(nodes: int) -> tuple[int, int, int, int]:
    """Return messages and bytes of the preflight, and what a second of training has after it."""
    sent: list[bytes] = []
    controls = [Control(_hello(node, nodes), silent_s=600) for node in range(nodes)]
    first, *others = controls
    for other in others:
        here, there = (asyncio.StreamReader(limit=LONGEST_BYTES) for _ in range(2))
        for control, peer, reader, writes_to in (
            (first, other, here, there),
            (other, first, there, here),
        ):
            connection = Peer(reader, cast(Any, Wire(writes_to, sent)))
            connection.hello = peer.me
            control.add(connection)
    for control in controls:
        control.nodes = [each.me for each in controls]
    place = {"ip": "10.11.7.50", "port": 40000, "mtu": "enp26s0np0 9000"}
    figures = {"inside": 1e11, "between": 1e10, "latency_s": 1e-5, "flops": [7e14] * 8}
    facts = {"code": "-" * FACTS_BYTES}
    for value in (place, {"problems": []}, {}, facts, figures):  # as `check_nodes` gathers them
        await asyncio.gather(*(control.gather("a value", value, 600) for control in controls))
    preflight = len(sent), sum(map(len, sent))
    unused: Any = SimpleNamespace(distributed=None)
    decides = judge.Judge(unused, unused, [RANKS_PER_NODE] * nodes)
    seen: list[RankStatus] = []
    with mock.patch.object(judge, "stuck_ranks", lambda every, _: seen.extend(every)):
        for _ in range(2):  # in the first second not all ranks are known
            sent.clear()
            seen.clear()
            for node, control in enumerate(controls):
                status = [RankStatus(node * RANKS_PER_NODE + i, "a") for i in range(RANKS_PER_NODE)]
                control.report({"attempt": 0, "status": status, "finished": False})
            for _ in controls:
                node, message = await first.next(60) or (0, {})
                decides.judge(node, message, unused)
    return *preflight, len(sent), len(seen)


async def _paths(nodes: int) -> int:
    """Return how many other nodes a node connects with."""
    echo, tried = connectivity._echo, []

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tried.append(writer)
        await echo(reader, writer)

    async def gather(_: str, value: Any, timeout_s: float) -> list[Any]:
        return [value] * nodes  # all of them are this one

    hellos = [_hello(node, nodes) for node in range(nodes)]
    control: Any = SimpleNamespace(node=0, me=hellos[0], nodes=hellos, gather=gather)
    environment: Any = SimpleNamespace(local_ip="127.0.0.1", interface="lo")
    with mock.patch.object(connectivity, "_echo", counted):
        await connectivity.require_paths(control, environment)
    return len(tried)
