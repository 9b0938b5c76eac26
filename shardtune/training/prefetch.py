"""The batches of the coming steps, made and moved to the device by a thread while the loop trains."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import torch
from transformers import PreTrainedModel

from shardtune.data.batch import Batch, build_batch
from shardtune.data.schedule import Schedule, Step
from shardtune.distributed.world import World
from shardtune.model.flops import cost_of

_STEPS_AHEAD = 2
_END_S = 2.0  # for the thread to end; it may hang in a disk, and ends with the process then

Fed = tuple[Step, list[Batch]]


@contextlib.contextmanager
def feed(
    schedule: Schedule,
    model: PreTrainedModel,
    rows_per_micro_batch: int,
    is_flat: bool,
    world: World,
) -> Iterator[Iterator[Fed]]:
    """Each step that is left, with this rank's micro-batches on `world.device`, at most two steps ahead of the loop.

    What fails in the thread is raised where the loop takes the next step, with its traceback. The thread ends with the
    context, and never keeps the process alive.
    """
    made: SimpleQueue[Fed | BaseException] = SimpleQueue()
    room, is_over = threading.Semaphore(_STEPS_AHEAD), threading.Event()
    cost = cost_of(model)

    def make() -> None:
        try:
            if world.device.type == "cuda":
                torch.cuda.set_device(world.device)  # each thread has its own
            for step in schedule.steps():
                room.acquire()
                if is_over.is_set():
                    return
                shares = step.micro_batches(cost, world.rank, world.size, rows_per_micro_batch)
                batches = [
                    build_batch(schedule.dataset, share, is_flat).to(world.device)
                    for share in shares
                ]
                made.put((step, batches))
        except BaseException as error:
            made.put(error)

    thread = threading.Thread(target=make, name="feeding", daemon=True)

    def take() -> Iterator[Fed]:
        for number in range(schedule.start.step + 1, schedule.total_steps + 1):
            world.progress.enter("data", number)
            with world.progress.working_in(thread):
                fed = made.get()
            if isinstance(fed, BaseException):
                raise fed
            room.release()
            yield fed

    thread.start()
    try:
        yield take()
    finally:
        is_over.set()
        room.release()
        thread.join(_END_S)
