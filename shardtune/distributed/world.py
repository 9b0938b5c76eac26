"""The processes of one run: who they are, and how they agree."""

from __future__ import annotations

import datetime
import json
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shardtune.distributed.older_torch  # noqa: F401, gives older ones what is used here
from shardtune.distributed.layout import Layout
from shardtune.distributed.meshes import Meshes
from shardtune.distributed.progress import Progress
from shardtune.errors import Aborted, UserError

T = TypeVar("T")

# Tokenising or reading a large input may take hours on one node while the others wait for it.
_AGREE_TIMEOUT_S = 2 * 24 * 3600.0
_OTHERS_REFUSE_WITHIN_S = 20.0
_VALUE_BYTES = 4 << 20  # the store refuses more than 8 MiB
# The agents end a stuck run before a collective's own timeout does, which names no rank.
_AGENTS_END_FIRST_S = 60


@dataclass(frozen=True)
class World:
    """One process's place in the run.

    `mesh` has the ranks of this rank's stage: its dimension is `shard`, behind `replicate` if there
    are several copies. `expert_mesh`, with parallel.expert above 1, divides each `shard` into
    `expert_shard` groups of `expert` consecutive ranks, which share one set of experts.
    """

    rank: int
    layout: Layout
    local_rank: int
    local_size: int
    node_rank: int
    device: torch.device
    meshes: Meshes
    store: dist.Store
    progress: Progress
    _round: count[int] = field(default_factory=count)

    @property
    def mesh(self) -> DeviceMesh:
        return self.meshes.mesh

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        return self.meshes.expert_mesh

    @property
    def size(self) -> int:
        return self.layout.ranks

    @property
    def stage(self) -> int:
        return self.rank // self.layout.stage_ranks

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.layout.stages - 1

    @property
    def stage_rank(self) -> int:
        return self.rank % self.layout.stage_ranks

    @property
    def share(self) -> tuple[int, int]:
        """The number of this rank's slice of its rows, and the number of slices."""
        return self.rank % self.layout.row_ranks, self.layout.row_ranks

    @property
    def data_rank(self) -> int:
        """The number of the part of a global batch that this rank sees."""
        return self.stage_rank // self.layout.row_ranks

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
        """Return every rank's JSON-able `value`, in rank order, on every rank: collective.

        The values go through the store: a rank may arrive hours after another. Rank 0 collects them
        into one: if every rank read those of all, 512 ranks would ask the store half a million
        times. Raises TimeoutError.
        """
        self.progress.meet()
        number = next(self._round)
        everyone = f"gather/{number}"
        keys = [f"{everyone}.{rank}" for rank in range(self.size)]
        set_value(self.store, keys[self.rank], value)
        if self.is_main:
            wait_for(self.store, keys, timeout_s)
            set_value(self.store, everyone, [get_value(self.store, key) for key in keys])
            # All ranks are in this round, so all have read the round before.
            delete_value(self.store, f"gather/{number - 1}")
        wait_for(self.store, [everyone], timeout_s)
        delete_value(self.store, keys[self.rank])
        values: list[Any] = get_value(self.store, everyone)
        return values

    def require_same(self, values: Mapping[str, Any], remedy: str) -> None:
        """Refuse JSON-able values that are not node 0's, with both: collective.

        Raises UserError.
        """
        (node0, expected), *others = self.all_gather_json([self.node_name, dict(values)])
        problems = [
            f"{name} is {json.dumps(expected[name])} on {node0} and {json.dumps(value)} on {node}"
            f" - {remedy}"
            for node, different in others
            for name, value in sorted(different.items())
            if value != expected[name]
        ]
        if problems:
            raise UserError(*dict.fromkeys(problems))

    def limit_steps(self, timeout_s: float) -> None:
        """Limit each step to this time from now on; the first one may set things up for longer."""
        if not self.progress.record.limits_steps:
            self.progress.record.limits_steps = True
            set_collective_timeout(timeout_s, self.meshes.groups)

    def all_gather_scalars(
        self, *values: torch.Tensor | float, vector: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return every rank's scalars, and its vector behind them: float64 [ranks, values].

        Collective. A host with a GPU does not wait for it.
        """
        # A tensor made from a number on the host would wait for the GPU; a filled one does not.
        mine = [
            torch.full((), 1.0, dtype=torch.float64, device=self.device) * value for value in values
        ]
        sent = torch.stack(mine) if vector is None else torch.cat([torch.stack(mine), vector])
        gathered = sent.new_empty(self.size * len(sent))
        self.progress.meet()
        with self.progress.waiting():
            dist.all_gather_single(gathered, sent)
        return gathered.view(self.size, len(sent))

    def all_reduce_max(self, *values: float) -> list[float]:
        """Return the largest of each value over the ranks: collective."""
        return self.all_gather_scalars(*values).amax(0).tolist()

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return its own result on each: collective.

        A rank that refuses does not wait for hours until the others have ended their work.

        Raises:
            UserError: on every rank, if `work` refused on any: the problems of all ranks, each
                once, behind the names of its nodes unless all nodes have it.
            Aborted: `work` refused on this rank, and others are still at it.
        """
        own_problems: list[str] = []
        try:
            result = work()
        except UserError as error:
            own_problems = error.problems
        timeout_s = _OTHERS_REFUSE_WITHIN_S if own_problems else _AGREE_TIMEOUT_S
        try:
            reports = self.all_gather_json([self.node_name, own_problems], timeout_s)
        except TimeoutError as late:
            raise Aborted(*own_problems, code=2) from late
        all_nodes = dict.fromkeys(node for node, _ in reports)
        nodes_with: dict[str, dict[str, None]] = {}
        for node, problems in reports:
            for problem in problems:
                nodes_with.setdefault(problem, {})[node] = None
        if nodes_with:
            raise UserError(
                *(
                    problem if nodes == all_nodes else f"{', '.join(nodes)}: {problem}"
                    for problem, nodes in nodes_with.items()
                )
            )
        return result

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, as `run_on_all_ranks`; return its JSON-able result on each."""
        result = self.run_on_all_ranks(lambda: work() if self.is_main else None)
        return cast(T, self.all_gather_json(result)[0])

    def on_local_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 of each node, as `on_rank0`; return its result on that node."""
        result = self.run_on_all_ranks(lambda: work() if self.is_node_main else None)
        reports = self.all_gather_json([self.node_rank, result] if self.is_node_main else None)
        return cast(T, dict(filter(None, reports))[self.node_rank])


def set_collective_timeout(timeout_s: float, groups: Iterable[dist.ProcessGroup]) -> None:
    """Set the timeout of these groups and of the group of all ranks, past the agents' limit.

    PyTorch has a public function for it since 2.15 only.
    """
    set_timeout: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    timeout = datetime.timedelta(seconds=timeout_s + _AGENTS_END_FIRST_S)
    for group in (None, *groups):
        set_timeout(timeout, group)


def wait_for(store: dist.Store, keys: Sequence[str], timeout_s: float) -> None:
    """Poll until all keys are in the store. The store's own wait would not react to signals.

    Raises TimeoutError.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no word under {keys[0]} within {timeout_s:.0f} s")
        time.sleep(pause_s)
        pause_s = min(0.2, 1.5 * pause_s)


def set_value(store: dist.Store, key: str, value: Any) -> None:
    """Leave a JSON-able value in pieces that the store takes; `key` itself appears last."""
    packed = zlib.compress(json.dumps(value).encode(), level=1)
    pieces = [packed[start : start + _VALUE_BYTES] for start in range(0, len(packed), _VALUE_BYTES)]
    for number, piece in enumerate(pieces):
        cast(Any, store).set(f"{key}/{number}", piece)  # bytes, which its type hints do not know
    store.set(key, str(len(pieces)))


def get_value(store: dist.Store, key: str) -> Any:
    pieces = [store.get(f"{key}/{number}") for number in range(int(store.get(key)))]
    return json.loads(zlib.decompress(b"".join(pieces)))


def delete_value(store: dist.Store, key: str) -> None:
    """Delete the value under `key`, if there is one: its memory is the launcher's."""
    if store.check([key]):
        for number in range(int(store.get(key))):
            store.delete_key(f"{key}/{number}")
        store.delete_key(key)
