"""Which rank the others wait for, how much longer it takes than they do, and for what.

In FSDP all ranks finish a step together, however fast each is: what tells them apart is the time that each did not
wait. On a CPU a collective blocks the host, and that is what is taken off. On a GPU it is what the compute stream waits
for others: between two events around FSDP's waits for gathered parameters and reduced gradients, which hold FSDP's
own copies too (memory traffic of the layer's size, alike on all ranks). A host too slow to feed its GPU thus counts as
its own rank's time. A slow network makes all ranks wait alike and names none.
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

from shardtune.distributed.progress import STEP_PHASES, Progress
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.training.metrics import Metrics

_EVERY_STEPS = 10
_SAID_ABOVE = 1.2  # times the median
_REPORTED = (*STEP_PHASES, "waiting")


class Stragglers:
    """Every rank calls `step_ended`; of each ten steps the slowest rank goes to `metrics.jsonl`, and one that is slow
    again is said.

    Every tenth step each rank has something to tell, `owed`, which the next step gathers with its loss: the host waits
    for the device once a step.
    """

    def __init__(self, model: PreTrainedModel, metrics: Metrics, world: World) -> None:
        self._metrics, self._world = metrics, world
        self._hosts = world.all_gather_json(socket.gethostname())
        self._seconds: Counter[str] = Counter()
        self.owed: list[float] = []  # this rank's seconds of a step in each of `_REPORTED`
        self._suspect: int | None = None
        self._steps = -1  # the first step also sets things up, and is no measure
        for module in model.modules():
            if isinstance(module, FSDPModule) and world.size > 1:
                _watch_collectives(module, world)

    def step_ended(self, step: int, of_ranks: list[float]) -> None:
        """Call it once a step, after the synchronisation with the device in it, before any evaluation or save.

        `of_ranks`: what all ranks owed when the step began, rank by rank.
        """
        if of_ranks:
            self._report(
                step - 1,
                [of_ranks[i : i + len(_REPORTED)] for i in range(0, len(of_ranks), len(_REPORTED))],
            )
            self.owed = []
        seconds = self._world.progress.take_seconds()
        self._world.progress.enter("reporting")
        self._steps += 1
        if self._steps == 0 or self._world.size == 1:
            return
        self._seconds.update({phase: seconds[phase] for phase in _REPORTED})
        if self._steps % _EVERY_STEPS:
            return
        self.owed = [self._seconds[phase] / _EVERY_STEPS for phase in _REPORTED]
        self._seconds.clear()

    def _report(self, step: int, of_ranks: list[list[float]]) -> None:
        rank, ratio, phase = slowest([seconds[: len(STEP_PHASES)] for seconds in of_ranks])
        seconds = dict(zip(_REPORTED, of_ranks[rank], strict=True))
        is_slow = ratio > _SAID_ABOVE
        # Once may be chance, the same one twice in a row is not.
        if is_slow and self._suspect == rank:
            spent = ", ".join(f"{name} {value:.2g} s" for name, value in seconds.items())
            logger.info(
                f"Slowest: rank {rank} on {self._hosts[rank]}, {ratio:.2f} x the median, in {STEP_PHASES[phase]} "
                f"(a step: {spent})"
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
    """Of each rank's seconds in each phase: the rank with the most, their ratio to the median of the ranks, and the
    phase in which it exceeds that phase's median by most.

    The median is the lower one, so that of two ranks the other is the measure.
    """
    totals = [sum(of_rank) for of_rank in seconds]
    rank = max(range(len(totals)), key=totals.__getitem__)
    usual = [median_low(of_phase) for of_phase in zip(*seconds, strict=True)]
    phase = max(range(len(usual)), key=lambda number: seconds[rank][number] - usual[number])
    return rank, totals[rank] / max(median_low(totals), 1e-9), phase


class _Collective(AllGather, ReduceScatter):
    """FSDP2's own way to gather or to reduce, counted; and timed where it blocks the host."""

    def __init__(self, run: Callable[..., Any], progress: Progress, blocks: bool) -> None:
        self._run, self._progress, self._blocks = run, progress, blocks
        self._ended: Any = None

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        # Counted here: where each replica is whole, FSDP2 scatters nothing, and asks for no more than this before it
        # reduces between the replicas.
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
        """FSDP2 calls it behind its all-reduce, and nothing before it, which begins when what this did has ended."""
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
