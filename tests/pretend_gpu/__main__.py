"""Run a command whose processes have pretended GPUs:

python -m tests.pretend_gpu --gpus N [--gb GB] COMMAND ...
"""

import argparse
import os
from pathlib import Path

from . import DEFAULT_GB, build

_SITE = Path(__file__).resolve().parent / "site"


def environment(gpus: int, gb: float = DEFAULT_GB) -> dict[str, str]:
    """Return the variables that give every Python process so many GPUs of this size."""
    before = os.environ.get("PYTHONPATH")
    path = (f"{before}:" if before else "") + str(_SITE)
    # `make test` hides GPUs; a process that hides them itself, as to compare with a CPU, has none.
    visible = ",".join(map(str, range(gpus)))
    size = {"PRETEND_GPUS": str(gpus), "PRETEND_GB": str(gb)}
    return {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": visible, **size}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pretend_gpu", description=__doc__)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--gb", type=float, default=DEFAULT_GB, help="of each GPU, in 1e9 bytes")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    build()  # once, not in each process
    if not arguments.command:
        parser.error("there is no command")
    os.environ |= environment(arguments.gpus, arguments.gb)
    os.execvp(arguments.command[0], arguments.command)


if __name__ == "__main__":
    main()
