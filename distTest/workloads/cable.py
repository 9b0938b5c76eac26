"""Run a command as four ranks of two network namespaces, and count the bytes between them.

python -m distTest.workloads.cable OUT.json BITS_PER_S PYTHON [arguments]

Each node sends at most BITS_PER_S; 0: no limit. OUT.json gets the bytes that each node has
received, without headers of frames. Needs Linux, root and iproute2.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distTest.rehearse.namespaces import Node, joined_nodes
from shardtune.distributed.signals import end_on_signal

RANKS_PER_NODE = 2
ADDRESSES = ["192.0.2.1", "192.0.2.2"]  # no network has these (RFC 5737)
INTERFACE = "cable"
PORT = 29600


def over_cable(out: Path, bits_per_s: int) -> list[str]:
    """Return a prefix that runs a one-process command as the ranks of two nodes on a cable."""
    return [sys.executable, "-m", "distTest.workloads.cable", str(out), str(bits_per_s)]


def main(arguments: Sequence[str]) -> None:
    end_on_signal("with all that it had started - run it again", code=1)
    out, bits_per_s, command = Path(arguments[0]), int(arguments[1]), arguments[2:]
    with joined_nodes(ADDRESSES, INTERFACE) as nodes:
        for node in nodes:
            node.limit(bits_per_s)
        started = [_start(node, number, command) for number, node in enumerate(nodes)]
        codes = [process.wait() for process in started]
        out.write_text(json.dumps([node.received_bytes() for node in nodes]), encoding="utf-8")
    sys.exit(max(map(abs, codes)))


def _start(node: Node, number: int, command: Sequence[str]) -> subprocess.Popen[Any]:
    python, *program = command
    launcher = ["-m", "torch.distributed.run", f"--nnodes={len(ADDRESSES)}"]
    launcher += [f"--node_rank={number}", f"--nproc_per_node={RANKS_PER_NODE}"]
    launcher += [f"--master_addr={ADDRESSES[0]}", f"--master_port={PORT}"]
    env = os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE}
    return subprocess.Popen([*node.prefix, python, *launcher, *program], env=env)


if __name__ == "__main__":
    main(sys.argv[1:])
