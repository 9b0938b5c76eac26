"""The kernels that one rank launches in each part of a step, and the waits of its host:

python -m tests.pretend_gpu.count --config FILE --model DIR --nodes 2 --gpus-per-node 8 [k=v ...]

Prints JSON; `counted` is the same from a process of its own. `python -m benchmarks kernels` makes
tables of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardtune.distributed import compiling
from shardtune.model import build
from shardtune.model.compiled_layers import compile_layers
from shardtune.planner.arithmetic.figures import Kernel, Kind
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.simulation.kernel_costs import kernel_of
from shardtune.training import optim
from shardtune.training.states import reshard
from shardtune.training.states.reshard import ReshardPolicy

from . import hollow, waits
from .compiled import Compiler
from .trace import Trace

_PARTS = {"forward": "forward", "backward": "backward", "norm": "norm and clip"}
_PARTS |= {"optimizer": "update"}


class Count(TorchDispatchMode):
    """Within this mode kernels and waits are counted by part of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: dict[str, Counter[Kernel]] = {}
        self.waits: Counter[str] = Counter()
        self.part = "forward"
        self.is_open = False

    def __enter__(self) -> Count:
        self.is_open = True
        waits.listeners.append(self._wait)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.is_open = False
        super().__exit__(*error)
        waits.listeners.remove(self._wait)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile refuses to run within this mode

    def launch(self, kernels: Counter[Kernel]) -> None:
        """Count kernels of compiled functions."""
        if self.is_open:
            self.kernels.setdefault(self.part, Counter()).update(kernels)

    def _wait(self, _: waits.HostWait) -> None:
        self.waits[self.part] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes first, and calls operators of its local tensors
        result = func(*args, **(kwargs or {}))
        is_fake = any(issubclass(kind, FakeTensor) for kind in types)
        kernel = None if is_fake else kernel_of(func, args, kwargs or {}, result, "cuda")
        if kernel:
            self.launch(Counter([kernel]))
        return result


def measure(
    options: argparse.Namespace, policy: ReshardPolicy | None, layers: range | None
) -> dict[str, Any]:
    """Count a rank's second step: `kernels` and `waits` of each part, and the `trace` of another.

    `policy` and `layers`, where they are given, take the place of what the rank would keep
    gathered, and of the layers that its stage would have.
    """
    hollow.install_for(options)
    count, trace = Count(), Trace()
    if policy:
        reshard.choose_reshard_policy = partial(_apply, policy)
    if layers:
        build.layers_of_stages = lambda model, stages: [layers] * stages

    def enter(phase: str) -> None:
        count.part = _PARTS.get(phase, phase)
        trace.enter(phase)

    torch.compile = Compiler(count.launch, lambda: count.is_open).compile
    compiling.can_compile = lambda _: True
    rank = hollow.lonely_rank(options, enter)
    run = rank.context.run
    compile_layers(rank.context.model, run.config.model.compile, run.world)
    optim.compile_update(rank.context.optimizer, run.config, run.world)
    _watch_head(rank.context, count)
    for name, after in (("squared_gradients", "norm"), ("clip_gradients", "optimizer")):
        function = getattr(optim, name)
        setattr(optim, name, hollow.entering(function, enter, "norm", after))
    rank.take_step()
    with count:
        rank.take_step()
    trace.passes.clear()
    with trace:
        rank.take_step()
    kernels = {
        part: [[*kernel, times] for kernel, times in counter.items()]
        for part, counter in count.kernels.items()
    }
    return {"kernels": kernels, "waits": count.waits, "trace": trace.lines()}


def _apply(policy: ReshardPolicy, model: Any, *_: Any) -> ReshardPolicy:
    policy.keep_gathered(model)
    return policy


def _watch_head(context: Any, count: Count) -> None:
    """Count a model's head apart, in the forward and in the backward."""
    if not context.run.world.is_last_stage:
        return
    head, stage = context.model.get_output_embeddings(), context.stage
    backward = stage.backward

    def enter(part: str) -> Any:
        count.part = part

    def begin(_: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        enter("head")
        if arguments[0].requires_grad:
            arguments[0].register_hook(lambda _: enter("backward"))

    def from_head(*arguments: Any, **options: Any) -> Any:
        enter("head")
        return backward(*arguments, **options)

    head.register_forward_pre_hook(begin)
    head.register_forward_hook(lambda *_: enter("forward"))
    stage.backward = from_head


class Counted(NamedTuple):
    """What `measure` returns."""

    kernels: dict[str, Counter[Kernel]]
    waits: Counter[str]
    trace: list[str]


def counted(
    config: Path,
    model: Path,
    machine: Machine,
    policy: ReshardPolicy,
    layers: range,
    *assignments: str,
    stage: int = 0,
) -> Counted:
    """Return what `measure` does, in a process of its own."""
    options = [f"--config={config}", f"--model={model}", f"--nodes={machine.nodes}"]
    options += [f"--gpus-per-node={machine.ranks_per_node}", f"--stage={stage}", *assignments]
    options += [f"--policy={json.dumps(vars(policy))}"]
    options += ["--layers", str(layers.start), str(layers.stop)]
    command = [sys.executable, "-m", "tests.pretend_gpu.count", *options]
    done = subprocess.run(
        command, cwd=hollow.REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
    record = json.loads(done.stdout.splitlines()[-1])
    kernels = {
        part: Counter({Kernel(Kind(kind), *rest): n for kind, *rest, n in rows})
        for part, rows in record["kernels"].items()
    }
    return Counted(kernels, Counter(record["waits"]), record["trace"])


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--policy", type=json.loads)
    parser.add_argument("--layers", type=int, nargs=2)
    given, rest = parser.parse_known_args()
    policy = ReshardPolicy(**given.policy) if given.policy else None
    layers = range(*given.layers) if given.layers else None
    print(json.dumps(measure(hollow.parse(rest, __doc__), policy, layers)))


if __name__ == "__main__":
    main()
