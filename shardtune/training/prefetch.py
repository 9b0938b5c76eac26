"""Make the batches of the coming steps in a thread, and move them to the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Queue

import torch

from shardtune.data.batch import Batch, build_batch
from shardtune.data.schedule import Schedule, Step
from shardtune.distributed.progress import Phase
from shardtune.training.context import TrainContext

StepBatches = tuple[Step, list[Batch]]


def prefetch(context: TrainContext, schedule: Schedule) -> Iterator[StepBatches]:
    """Yield each step that is left, with this rank's micro-batches on `world.device`."""
    # The thread is at most two steps ahead, since its batches take memory. Its exception is raised,
    # with its traceback, where the loop takes the next step. The thread ends with the process.
    queue: Queue[StepBatches | BaseException] = Queue(maxsize=1)  # and the thread holds one more
    world, rows = context.run.world, context.run.world.layout.micro_batch_size
    cost, dataset = context.row_cost, schedule.dataset

    def make_batches() -> None:
        try:
            if world.device.type == "cuda":
                torch.cuda.set_device(world.device)  # each thread has its own
            # The schedule is the same on every rank, so no rank sends another one an index.
            for step in schedule.steps():
                shares = step.micro_batches(cost, world.data_rank, world.layout.data_ranks, rows)
                batches = [
                    build_batch(dataset, sequences, context.is_flat, world.share).to(world.device)
                    for sequences in shares
                ]
                queue.put((step, batches))
        except BaseException as error:  # without this the loop would wait for ever
            queue.put(error)

    thread = threading.Thread(target=make_batches, name="prefetch", daemon=True)
    thread.start()
    # By number, since the progress must name the awaited step before the thread has made it.
    for number in range(schedule.start.step + 1, schedule.total_steps + 1):
        world.progress.enter(Phase.DATA, number)
        with world.progress.working_in(thread):
            step_batches = queue.get()
        if isinstance(step_batches, BaseException):
            raise step_batches
        yield step_batches
