"""Run train_fsdp.py in this process, changed or measured in the ways that the first argument names.

python -m distTest.workloads.wrapped WAY,WAY=VALUE,... [arguments of train_fsdp.py]

Each way is a context manager of WAYS, in which the script runs.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch

# Begins a line of output that ends with figures in JSON.
CPU_LABEL = "CPU seconds of the process until the end of each step: "


class _Finished(BaseException):
    """All steps are taken, and in metrics.jsonl."""


@contextmanager
def unsaved(script: Any, _: str) -> Iterator[None]:
    """End before the first checkpoint, which takes a large model more time than its steps."""
    from shardtune.checkpoint import Saver

    def finish(*_: Any) -> None:
        raise _Finished

    saver: Any = Saver
    saver.save = finish
    try:
        yield
    except _Finished:
        print("Finished: nothing is saved", flush=True)


@contextmanager
def drawn_on_device(script: Any, _: str) -> Iterator[None]:
    """Draw random weights on the device; a CPU takes minutes, and draws other weights."""
    build = import_module("shardtune.model.build")
    draw = build.draw_weights

    def draw_on_device(model: Any, seed: int, device: torch.device, *more: Any) -> None:
        with device:
            draw(model, seed, device, *more)

    vars(build)["draw_weights"] = draw_on_device
    yield


@contextmanager
def planned(script: Any, path: str) -> Iterator[None]:
    """Read the plan, a `Prediction`, from this JSON file, and simulate no step."""
    run_plan = import_module("shardtune.planner.run_plan")
    vars(run_plan)["_simulate"] = lambda *_: subprocess.Popen(
        ["cat", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield


@contextmanager
def cpu_seconds(script: Any, _: str) -> Iterator[None]:
    """Print the CPU seconds that the process had used at the end of each step."""
    train_step, ends = script.train_step, list[float]()

    def timed(*arguments: Any) -> Any:
        done = train_step(*arguments)
        ends.append(time.process_time())
        return done

    script.train_step = timed
    yield
    print(CPU_LABEL + json.dumps(ends), flush=True)


_Way = Callable[[Any, str], AbstractContextManager[None]]
_FUNCTIONS: list[_Way] = [unsaved, drawn_on_device, planned, cpu_seconds]
WAYS = {way.__name__: way for way in _FUNCTIONS}


def main() -> None:
    script, ways = import_module("train_fsdp"), sys.argv.pop(1)
    with ExitStack() as entered:
        for way in filter(None, ways.split(",")):
            name, _, value = way.partition("=")
            entered.enter_context(WAYS[name](script, value))
        script.main()


if __name__ == "__main__":
    from shardtune.distributed.exit_code import run

    run(main)
