"""Run train_fsdp.py, and print the CPU seconds that the process had used at the end of each step.

python -m benchmarks.step_cpu [arguments of train_fsdp.py]
"""

from __future__ import annotations

import json
import time
from typing import Any

import train_fsdp
from benchmarks.measure import CPU_LABEL
from shardtune.distributed.exit_code import run


def main() -> None:
    train_step, ends = train_fsdp.train_step, list[float]()

    def timed(*arguments: Any) -> Any:
        done = train_step(*arguments)
        ends.append(time.process_time())
        return done

    train_fsdp.train_step = timed
    train_fsdp.main()
    print(CPU_LABEL + json.dumps(ends), flush=True)


if __name__ == "__main__":
    run(main)
