"""The order in which one rank asks for collectives, computes and waits, in letters:

python -m tests.pretend_gpu.trace --config FILE --model DIR --nodes 2 --gpus-per-node 8 [k=v ...]

    A3 A3e    gathers the parameters of layer 3, and its spread experts; A those around the layers
    R3 R3e R  reduces their gradients, within a replica
    x X       exchanges the sizes of what goes to experts, and rows for them
    S         the host waits for the device
    f b g     runs attention forward and backward, and a grouped product

A line for each forward and backward. What a rank asks for in this order runs in it, stream by
stream.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from . import hollow, waits

_KERNELS = {"_varlen_attn": "f", "_varlen_attn_backward": "b", "_grouped_mm": "g"}
_COLLECTIVES = {
    "_allgather_base_": "A",
    "all_gather_into_tensor_out": "A",
    "_reduce_scatter_base_": "R",
}


class Trace(TorchDispatchMode):
    """Within this mode the main thread's operators are noted, and those of its backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self._module = ""  # whose parameters FSDP2 gathers, or whose gradients it reduces

    def __enter__(self) -> Trace:
        waits.listeners.append(self._wait)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        waits.listeners.remove(self._wait)

    def _wait(self, _: waits.HostWait) -> None:
        self.events.append("S")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        if name == "_record_function_enter_new":
            if label := re.match(r"FSDP::(all_gather|post_backward_reduce)( \((.*)\))?$", args[0]):
                self._module = label[3] or ""
        elif func.namespace == "c10d" and name in _COLLECTIVES:
            self.events.append(_COLLECTIVES[name] + _short(self._module))
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
    trace, lines = Trace(), []

    def enter(phase: str) -> None:
        trace.events = []
        lines.append((phase, trace.events))

    rank = hollow.lonely_rank(options, enter)
    rank.take_step()
    lines.clear()
    with trace:
        rank.take_step()
    passes = [line for line in lines if line[0] in ("forward", "backward")]
    return [f"{phase}: {' '.join(events)}" for phase, events in passes]


def trace_of(config: Path, model: Path, *assignments: str, timeout_s: float = 300) -> list[str]:
    """Return what `traced` does, of the first of 2 x 8 ranks, in a process of its own."""
    options = [f"--config={config}", f"--model={model}", *assignments]
    command = [sys.executable, "-m", "tests.pretend_gpu.trace", *options]
    done = subprocess.run(
        command,
        cwd=hollow.REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout.splitlines()


if __name__ == "__main__":
    print(*traced(hollow.parse(doc=__doc__)), sep="\n")
