"""The rank that the others wait for, how much slower it is than they are, and in which phase.

In FSDP all ranks end a step together, however fast each is. The time in which a rank does not wait
tells them apart:

- On a CPU a collective blocks the host: its seconds are taken off.
- On a GPU the compute stream waits, between two events around FSDP's waits for gathered parameters
  and reduced gradients. These hold FSDP's own copies too, alike on all ranks.

A host too slow to feed its GPU counts as its own rank's time. A slow network makes all ranks wait
alike and names none.
"""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from transformers import PreTrainedModel

from shardtune.distributed.progress import STEP_PHASES, Phase, Progress
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.training.metrics import Metrics

_EVERY_STEPS = 10
_LOG_ABOVE = 1.2  # times the median
_PHASES = (*STEP_PHASES, "waiting")


class Stragglers:
    """Find the slowest rank of every ten steps.

    It goes to `metrics.jsonl`, and is logged if it is slow for the second time in a row.

    After every tenth step `pending` holds this rank's mean seconds in each of `_PHASES`. The next
    step gathers them with its loss, so that the host waits for the device once a step.
    """

    def __init__(self, model: PreTrainedModel, metrics: Metrics, world: World) -> None:
        self._metrics, self._world = metrics, world
        self._hosts = world.all_gather_json(socket.gethostname())
        self._seconds: Counter[str] = Counter()
        self.pending: list[float] = []
        self._suspect: int | None = None
        self._steps = -1  # the first step also sets things up, and is no measure
        for module in model.modules():
            if isinstance(module, FSDPModule) and world.size > 1:
                _watch_collectives(module, world)

    def step_ended(self, step: int, seconds_by_rank: list[list[float]]) -> None:
        """Count the step's seconds; every rank calls it after the step's host sync.

        `seconds_by_rank`: [rank][phase], what was `pending` on each rank when the step began.
        """
        if seconds_by_rank:
            self._report(step - 1, seconds_by_rank)
            self.pending = []
        seconds = self._world.progress.take_seconds()
        self._world.progress.enter(Phase.REPORTING)
        self._steps += 1
        if self._steps == 0 or self._world.size == 1:
            return
        self._seconds.update({phase: seconds[phase] for phase in _PHASES})
        if self._steps % _EVERY_STEPS == 0:
            self.pending = [self._seconds[phase] / _EVERY_STEPS for phase in _PHASES]
            self._seconds.clear()

    def _report(self, step: int, seconds_by_rank: list[list[float]]) -> None:
        rank, ratio, phase = slowest([seconds[: len(STEP_PHASES)] for seconds in seconds_by_rank])
        seconds = dict(zip(_PHASES, seconds_by_rank[rank], strict=True))
        is_slow = ratio > _LOG_ABOVE
        if is_slow and self._suspect == rank:  # once may be chance
            spent = ", ".join(f"{name} {value:.2g} s" for name, value in seconds.items())
            logger.info(
                f"Slowest: rank {rank} on {self._hosts[rank]}, {ratio:.2f} x the median, "
                f"in {STEP_PHASES[phase]} (a step: {spent})"
            )
        self._suspect = rank if is_slow else None
        self._metrics.write(
            "ranks",
            step=step,
            slowest_rank=rank,
            host=self._hosts[rank],
            ratio=ratio,
            phase=STEP_PHASES[phase],
            seconds=seconds,
        )


def slowest(seconds: Sequence[Sequence[float]]) -> tuple[int, float, int]:
    """Return the slowest rank, its time as a multiple of the median, and the phase to blame.

    `seconds`: [rank][phase]. The phase is the one in which the rank is furthest above the median of
    that phase. A median is the lower one: of two ranks, the other one is the measure.
    """
    totals = [sum(phases) for phases in seconds]
    rank = max(range(len(totals)), key=totals.__getitem__)
    medians = [median_low(ranks) for ranks in zip(*seconds, strict=True)]
    phase = max(range(len(medians)), key=lambda number: seconds[rank][number] - medians[number])
    return rank, totals[rank] / max(median_low(totals), 1e-9), phase


class _Collective(AllGather, ReduceScatter):
    """FSDP2's own all-gather or reduce-scatter, counted; and timed where it blocks the host."""

    def __init__(self, run: Callable[..., Any], progress: Progress, blocks: bool) -> None:
        self._run, self._progress, self._blocks = run, progress, blocks
        self._ended: Any = None

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        # Counted here: where each replica is whole, FSDP2 scatters nothing, and calls no more than
        # this before it reduces between the replicas.
        self._progress.arrive()
        allocated = torch.empty(*size, dtype=dtype, device=device)
        self._note_end()
        return allocated

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **options: Any
    ) -> Any:
        with self._progress.stalled() if self._blocks else contextlib.nullcontext():
            work = self._run(output_tensor, input_tensor, **options)
        self._note_end()
        return work

    def _note_end(self) -> None:
        if self._blocks:
            self._ended = self._progress.mark()

    def reduced_between_replicas(self, _: torch.Tensor) -> None:
        """Count the time since this collective as waiting; FSDP2 calls it after its all-reduce."""
        self._progress.stalled_since(self._ended)


def _watch_collectives(module: FSDPModule, world: World) -> None:
    progress, blocks = world.progress, world.device.type == "cpu"
    reduce_scatter = _Collective(dist.reduce_scatter_single, progress, blocks)
    module.set_custom_all_gather(_Collective(dist.all_gather_single, progress, blocks))
    module.set_custom_reduce_scatter(reduce_scatter)
    if blocks:
        if world.replicas > 1:
            module.set_all_reduce_hook(reduce_scatter.reduced_between_replicas)
        return

    def stalled(method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            with progress.stalled():
                return method(*arguments)

        return timed

    for group in module._get_fsdp_state()._fsdp_param_groups:
        for name in ("wait_for_unshard", "post_backward", "finalize_backward"):
            setattr(group, name, stalled(getattr(group, name)))
