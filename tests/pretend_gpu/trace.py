"""The order in which one rank asks for collectives, computes and waits, in letters:

python -m tests.pretend_gpu.trace --config FILE --model DIR --nodes 2 --gpus-per-node 8 [k=v ...]

    A3 A3e    gathers the parameters of layer 3, and its spread experts; A those around the layers
    R3 R3e R  reduces their gradients; r where gathers share the group
    x X       exchanges the sizes of what goes to experts, and rows for them
    S         the host waits for the device
    f b g     runs attention forward and backward, and a grouped product

A line for each forward and backward. What a rank asks for in this order runs in it, stream by
stream.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from . import hollow, waits

_KERNELS = {"_varlen_attn": "f", "_varlen_attn_backward": "b", "_grouped_mm": "g"}


class Trace(TorchDispatchMode):
    """Within this mode the main thread's operators are noted, and those of its backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []  # of the phase that runs
        self.passes: list[tuple[str, list[str]]] = []
        self._gathering: set[str] = set()  # groups
        self._module = ""  # whose parameters FSDP2 gathers, or whose gradients it reduces

    def __enter__(self) -> Trace:
        waits.listeners.append(self._wait)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        waits.listeners.remove(self._wait)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile refuses to run within this mode

    def enter(self, phase: str) -> None:
        self.events = []
        self.passes.append((phase, self.events))

    def lines(self) -> list[str]:
        """Return the order of each forward and backward: `phase: letters`."""
        passes = [each for each in self.passes if each[0] in ("forward", "backward")]
        return [f"{phase}: {' '.join(events)}" for phase, events in passes if events]

    def _wait(self, _: waits.HostWait) -> None:
        self.events.append("S")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        if name == "_record_function_enter_new":
            if label := re.match(r"FSDP::(all_gather|post_backward_reduce)( \((.*)\))?$", args[0]):
                self._module = label[3] or ""
        elif name == "_allgather_base_":
            self._gathering.add(dist.ProcessGroup.unbox(args[2]).group_name)
            self.events.append("A" + _short(self._module))
        elif name == "_reduce_scatter_base_":
            is_shared = dist.ProcessGroup.unbox(args[2]).group_name in self._gathering
            self.events.append(("r" if is_shared else "R") + _short(self._module))
        elif name == "alltoall_base_":
            self.events.append("X" if args[0].is_floating_point() else "x")
        elif name in _KERNELS:
            self.events.append(_KERNELS[name])
        return func(*args, **(kwargs or {}))


def _short(module: str) -> str:
    """Return the number of a module's layer, with an e for its experts."""
    numbers = re.findall(r"\.(\d+)\b", module)
    return "".join(numbers[:1]) + "e" * module.endswith("experts")


def traced(options: argparse.Namespace) -> list[str]:
    """Return the order of each forward and backward of a rank's second step: `phase: letters`."""
    hollow.install_for(options)
    trace = Trace()
    rank = hollow.lonely_rank(options, trace.enter)
    rank.take_step()
    trace.passes.clear()
    with trace:
        rank.take_step()
    return trace.lines()


def trace_of(
    config: Path, model: Path, *assignments: str, planned: str, stage: int = 0
) -> list[str]:
    """Return what `traced` does, of a stage's first rank on 2 x 8 GPUs, in a process of its own.

    `planned`: the fields of the plan's policy, as JSON.
    """
    options = [f"--config={config}", f"--model={model}", f"--planned={planned}", f"--stage={stage}"]
    return hollow.in_process("tests.pretend_gpu.trace", *options, *assignments, timeout_s=300)


if __name__ == "__main__":
    print(*traced(hollow.parse(doc=__doc__)), sep="\n")
