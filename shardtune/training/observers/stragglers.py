"""Find the rank that other ranks wait for, its slowness, and its slowest phase.

In FSDP all ranks end a step together, however fast each is. They differ in the time in which they
do not wait. A rank waits inside FSDP's gathers and reductions: on a CPU its host, on a GPU its
compute stream. FSDP's own copies count as waiting, too, equally on all ranks.

A host too slow to feed its GPU counts as its rank's own time. A slow network makes all ranks wait
alike, so that no rank is named.
"""

import socket
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from statistics import median_low

from transformers import PreTrainedModel

from shardtune.distributed.progress import STEP_PHASES
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.metrics_schema import RanksEntry
from shardtune.model.fsdp_groups import groups_of
from shardtune.training.observers.metrics import Metrics, StepEnded, StepObserver

_EVERY_STEPS = 10
_LOG_ABOVE = 1.2  # times the median
_HOST = socket.gethostname()


class Stragglers(StepObserver):
    """Writes the slowest rank of ten steps to `metrics.jsonl`; logs one slow twice in a row."""

    def __init__(self, model: PreTrainedModel, metrics: Metrics, world: World) -> None:
        self._metrics, self._world = metrics, world
        self._seconds: Counter[str] = Counter()
        self._suspect: int | None = None
        self._steps = -1  # the first step does not count: it also compiles and allocates
        if world.size > 1:
            for group in groups_of(model):
                group.time(world.progress.waiting)

    def step_ended(self, ended: StepEnded) -> None:
        self._steps += 1
        if self._steps == 0 or self._world.size == 1:
            return
        self._seconds.update(ended.seconds_by_phase)
        if self._steps % _EVERY_STEPS == 0:
            means = {phase: total / _EVERY_STEPS for phase, total in self._seconds.items()}
            self._seconds.clear()
            # Through the store: a collective of tensors would let the host wait for the device.
            per_rank = self._world.all_gather_json([_HOST, means])
            self._report(ended.step.number, *zip(*per_rank, strict=True))

    def _report(self, step: int, hosts: Sequence[str], means: Sequence[dict[str, float]]) -> None:
        seconds_of = [[each[name] for name in STEP_PHASES] for each in means]
        rank, ratio, phase = slowest(seconds_of, self._world.layout.stage_ranks)
        host, seconds, name = hosts[rank], means[rank], STEP_PHASES[phase]
        is_slow = ratio > _LOG_ABOVE
        if is_slow and self._suspect == rank:  # a single slow measure may be chance
            spent = ", ".join(f"{phase} {value:.2g} s" for phase, value in seconds.items())
            logger.info(
                f"Slowest: rank {rank} on {host}, {ratio:.2f} x the median, in {name} "
                f"(a step: {spent})"
            )
        self._suspect = rank if is_slow else None
        self._metrics.write(
            RanksEntry(
                kind="ranks",
                step=step,
                slowest_rank=rank,
                host=host,
                ratio=ratio,
                phase=name,
                seconds=seconds,
            )
        )


def slowest(seconds: Sequence[Sequence[float]], stage_ranks: int) -> tuple[int, float, int]:
    """Return the slowest rank, its time as a multiple of the median, and the phase to blame.

    `seconds`: [rank][phase].
    """
    # Stages do different work, so that a rank is compared with the ranks of its own stage. The
    # blamed phase is that in which the rank is furthest above the phase's median. Of two middle
    # values the median is the lower one: in a pair, the faster rank is the measure.
    found = []
    for first in range(0, len(seconds), stage_ranks):
        own = seconds[first : first + stage_ranks]
        totals = [sum(phases) for phases in own]
        rank = max(range(len(totals)), key=totals.__getitem__)
        above = [
            of_rank - median_low(ranks) for of_rank, *ranks in zip(own[rank], *own, strict=True)
        ]
        ratio = totals[rank] / max(median_low(totals), 1e-9)
        found.append((first + rank, ratio, above.index(max(above))))
    return max(found, key=itemgetter(1))
