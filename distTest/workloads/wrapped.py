"""Run train_fsdp.py in this process, changed or measured in the ways that the first argument names.

python -m distTest.workloads.wrapped WAY,WAY=VALUE,... [arguments of train_fsdp.py]

Each way is a function of WAYS, entered before the script runs and left behind it, the last one
first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Lines of output with figures in JSON behind them.
PROFILE_LABEL = "Seconds of a step by operation: "
CPU_LABEL = "CPU seconds of the process until the end of each step: "
_KINDS = {
    "matrix products": ("mm", "addmm", "addmm_", "bmm", "_grouped_mm"),
    "attention": (
        *("_scaled_dot_product_flash_attention_for_cpu", "_flash_attention_forward"),
        *("_scaled_dot_product_flash_attention_for_cpu_backward", "_flash_attention_backward"),
    ),
    "copies, casts and fills": (
        *("copy_", "cat", "fill_", "zero_", "index", "index_select", "index_add_"),
        "slice_scatter",
    ),
    "optimizer and gradient norm": ("_fused_adamw_", "linalg_vector_norm", "_foreach_mul_"),
}
_KIND_OF = {f"aten::{name}": kind for kind, names in _KINDS.items() for name in names}
_OTHERS = "normalisation, activations and other element-wise operations"
_HOST = "Python and dispatch"
_ATTENTION_OF_CPU = "shardtune::causal_documents"  # made of other operators
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm.default)


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
    """Draw weights of `model.init=random` on the device: others, where a CPU takes minutes."""
    build = import_module("shardtune.model.build")
    draw = build.draw_weights

    def draw_on_device(model: Any, seed: int, device: torch.device, *more: Any) -> None:
        with device:
            draw(model, seed, device, *more)

    vars(build)["draw_weights"] = draw_on_device
    yield


@contextmanager
def planned(script: Any, path: str) -> Iterator[None]:
    """Take the plan in this file, JSON of a `Prediction`, where a run would simulate a step."""
    run_plan = import_module("shardtune.planner.run_plan")
    vars(run_plan)["_simulate"] = lambda *_: subprocess.Popen(
        ["cat", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield


@contextmanager
def noted_rows(script: Any, path: str) -> Iterator[None]:
    """Write the tokens of each row of one document, a list in the order of the steps, to a file."""
    train_step, rows = script.train_step, list[Any]()

    def noting(context: Any, step: Any, micro_batches: Any, stop: Any) -> Any:
        for batch in micro_batches:
            rows.extend(batch.input_ids.flatten().split(batch.lengths))
        return train_step(context, step, micro_batches, stop)

    script.train_step = noting
    yield
    Path(path).write_text(json.dumps([row.tolist() for row in rows]), encoding="utf-8")


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


@contextmanager
def profiled(script: Any, _: str) -> Iterator[None]:
    """Print the seconds of each step by kind of operation; on a GPU, the seconds of its kernels."""
    train_step = script.train_step
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)

    def profiled_step(*arguments: Any) -> Any:
        started = time.perf_counter()
        with profile(activities=activities) as profiler:
            done = train_step(*arguments)
        seconds = time.perf_counter() - started
        print(PROFILE_LABEL + json.dumps(_by_kind(profiler, seconds)), flush=True)
        return done

    script.train_step = profiled_step
    yield


def _by_kind(profiler: Any, seconds: float) -> dict[str, float]:
    """Return the seconds within each kind of operation; the rest of the step is the host's."""
    seconds_of_kind: defaultdict[str, float] = defaultdict(float)
    on_gpu = torch.cuda.is_available()
    for event in profiler.events():
        kind = _KIND_OF.get(event.name, _OTHERS if event.name.startswith("aten::") else _HOST)
        if _is_within(event, _ATTENTION_OF_CPU):
            kind = "attention"
        time_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        seconds_of_kind[kind] += time_us / 1e6
    seconds_of_kind[_HOST] += seconds - sum(seconds_of_kind.values())
    return dict(sorted(seconds_of_kind.items(), key=lambda item: -item[1]))


def _is_within(event: Any, name: str) -> bool:
    """Return whether the event, or one around it, has a name that begins so."""
    while event is not None and not event.name.startswith(name):
        event = event.cpu_parent
    return event is not None


@contextmanager
def counted(script: Any, value: str) -> Iterator[None]:
    """Count collectives and the rows through the head: `counted=OUT:VOCABULARY`.

    Each rank writes OUT.<rank>.json: for each collective the calls and the bytes of its largest
    tensor, which is the one that is gathered or reduced; and as `head` the rows of all products
    whose width is the vocabulary.
    """
    out, _, vocabulary = value.rpartition(":")
    with _Operators(int(vocabulary)) as operators:
        yield
    path = Path(f"{out}.{os.environ.get('RANK', '0')}.json")
    path.write_text(json.dumps(operators.totals), encoding="utf-8")


class _Operators(TorchDispatchMode):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.totals: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        if operation.namespace in ("c10d", "_c10d_functional"):
            tensors = [x for x in tree_leaves([args, kwargs]) if isinstance(x, torch.Tensor)]
            total = self.totals[operation.name().partition("::")[2].strip("_")]
            total["count"] += 1
            total["bytes"] += max((tensor.nbytes for tensor in tensors), default=0)
        elif operation in _PRODUCTS and result.shape[-1] == self.vocabulary:
            self.totals["head"]["count"] += result.shape[0]
        return result


@contextmanager
def compiled_updates(script: Any, _: str) -> Iterator[None]:
    """Compile the updates of low-precision weights, which changes no bit of them."""
    optim: Any = import_module("shardtune.training.optim")

    def compile_update(optimizer: Any, *_: Any) -> None:
        if isinstance(optimizer, optim.LowPrecisionAdamW):
            optimizer.compile_update()

    optim.compile_update = compile_update
    yield


@contextmanager
def short_of_memory(script: Any, _: str) -> Iterator[None]:
    """Keep neither gathered weights nor whole gradients, as where they do not fit."""
    vars(import_module("shardtune.training.reshard"))["_free_bytes"] = lambda world: 0.0
    yield


@contextmanager
def rounded_to_nearest(script: Any, _: str) -> Iterator[None]:
    """Round weights and moments to the nearest value, which the product avoids."""

    def store(target: torch.Tensor, value: torch.Tensor, noise: torch.Tensor) -> None:
        target.copy_(value)

    vars(import_module("shardtune.training.low_precision_optim"))["_store"] = store
    yield


_FUNCTIONS: list[Callable[[Any, str], AbstractContextManager[None]]] = [
    *(unsaved, drawn_on_device, planned, noted_rows, cpu_seconds, profiled, counted),
    *(compiled_updates, short_of_memory, rounded_to_nearest),
]
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
