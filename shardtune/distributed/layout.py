"""How ranks and rows are divided, from the configuration alone. Without torch, which the agents do
not load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardtune.config import Config, ParallelConfig
from shardtune.errors import divisors

# Ranks along these see the same rows, and so are one data rank.
_OF_ONE_DATA_RANK = ("stages", "context")


def data_ranks(ranks: int, parallel: ParallelConfig | Mapping[str, int]) -> int:
    """Return how many parts a global batch is in. A degree that `parallel` lacks is 1."""
    degrees: dict[str, int] = dict(parallel)
    for name in _OF_ONE_DATA_RANK:
        ranks //= degrees.get(name, 1)
    return ranks


def rows_per_step(ranks: int, config: Config) -> int:
    """Return the rows of a global batch, the effective batch size."""
    train = config.train
    rows_per_rank = train.micro_batch_size * train.gradient_accumulation_steps
    return rows_per_rank * data_ranks(ranks, config.parallel)


def tokens_per_rank(config: Config) -> int:
    """Return the tokens of a micro-batch of full rows that a rank has, the most of all ranks."""
    return -(-config.train.micro_batch_size * config.data.max_length // config.parallel.context)


class Undivided(NamedTuple):
    """A key whose parts do not divide the ranks that the keys before it have left."""

    key: str
    parts: int
    ranks: int
    whole: str  # what these ranks are

    @property
    def nearest(self) -> int:
        """The number of parts that works and is the nearest, the smaller of two."""
        working = (n for n in range(1, self.ranks + 1) if self.ranks % n == 0)
        return min(working, key=lambda n: abs(n - self.parts))


def undivided(
    size: int, stages: int, replicate: int, expert: int, context: int
) -> Iterator[Undivided]:
    """Yield each key that does not divide what the ones before it have left of so many ranks.

    The ranks of a stage that share a row may have different shards, or replicas.
    """
    ranks, divided = size, ["world size"]
    for key, parts, is_named in (
        ("parallel.stages", stages, stages > 1),
        ("parallel.replicate", replicate, True),
        ("parallel.expert", expert, True),
    ):
        if ranks % parts:
            whole = " / ".join(divided) if len(divided) > 1 else "the world size"
            yield Undivided(key, parts, ranks, whole)
        else:
            ranks //= parts
        divided += [key] if is_named else []
    stage_ranks = size if size % stages else size // stages
    if stage_ranks % context:
        whole = "world size / parallel.stages" if stages > 1 else "the world size"
        yield Undivided("parallel.context", context, stage_ranks, whole)


def mesh_problems(size: int, parallel: ParallelConfig) -> Iterator[str]:
    """Yield why so many ranks cannot be divided as configured."""
    keys = (parallel.stages, parallel.replicate, parallel.expert, parallel.context)
    for key, parts, ranks, whole in undivided(size, *keys):
        remedy = f"one of {divisors(ranks)}" if ranks > 1 else f"{key}=1"
        yield f"{key}={parts} does not divide {whole}, {ranks} - use {remedy}"


def split_stage(node_of_rank: Sequence[int], stages: int) -> str:
    """Return why a stage is across a part of two nodes, or an empty text.

    What crosses nodes would then be gathers and reductions, not hidden states alone.
    """
    if not _is_split(node_of_rank, stages):
        return ""
    ranks = len(node_of_rank)
    whole = [n for n in range(1, ranks + 1) if ranks % n == 0 and not _is_split(node_of_rank, n)]
    nearest = min(whole, key=lambda n: abs(n - stages))
    return (
        f"parallel.stages={stages} puts a stage of {ranks // stages} ranks across part of two "
        f"nodes - use parallel.stages={nearest}"
    )


def _is_split(node_of_rank: Sequence[int], stages: int) -> bool:
    stage_ranks = len(node_of_rank) // stages
    for first in range(0, len(node_of_rank), stage_ranks):
        inside = set(node_of_rank[first : first + stage_ranks])
        outside = {*node_of_rank[:first], *node_of_rank[first + stage_ranks :]}
        if len(inside) > 1 and inside & outside:
            return True
    return False
