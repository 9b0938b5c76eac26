"""Compare shardtune with its peers on this machine's CPU; writes RESULTS.md.

All sides train the same weights on the same chats. All of the chats are one optimizer step, so
every side has the same global batch, however it orders and packs. At every step its loss must
equal the reference's before any of its figures counts. In each round the sides take turns, in
another order each time. Each runs in its own process on one pinned core with one thread. Its first
step also sets things up and is not counted.
"""

import datetime
import os
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.sides import FAILED, TOLERANCE
from distTest.workloads.chats import MIXES
from distTest.workloads.script import REPOSITORY, absolute, commit, cpu, output_of, versions

# Modules with `variants(options)`; `measure(options, *variant)`, which returns figures of the
# variant, or nothing; and `lines(options, figures, *variant)`. In the order of the page.
SECTIONS = ("one", "cable")


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=absolute, default=REPOSITORY / "models/SmolLM2-135M-Instruct")
    peers = REPOSITORY / ".venv/peers/bin/python"
    add("--peers", type=absolute, default=peers, help="the Python of the peers' environment")
    add("--results", type=absolute, default=REPOSITORY / "benchmarks/RESULTS.md")
    add("--work", type=absolute, default=REPOSITORY / "runs/bench", help="inputs and runs; emptied")
    add("--dtypes", nargs="+", choices=tuple(TOLERANCE), default=default_dtypes(), help="of one")
    add("--mixes", nargs="+", choices=tuple(MIXES), default=tuple(MIXES), help="of chats, of one")
    add("--rounds", type=int, default=2, help="of one")
    add("--steps", type=int, default=3, help="of each run; the first is not counted")
    parser.set_defaults(sections=SECTIONS)


def default_dtypes() -> list[str]:
    """Return float32, and bfloat16 too if the CPU multiplies it natively."""
    return ["float32", "bfloat16"] if {"avx512_bf16", "amx_bf16"} & set(_native()) else ["float32"]


def _native() -> list[str]:
    flags = torch.cpu.get_capabilities()
    return [flag for flag in ("avx512_f", "avx512_bf16", "amx_bf16") if flags.get(flag)]


def main(options: Namespace) -> None:
    """Measure the sections of the options; parts of the page on others stay as they are."""
    if not options.peers.exists():
        remedy = "run `make .venv/peers/.installed`, or name another with --peers"
        sys.exit(f"ERROR: {options.peers} does not exist - {remedy}")
    torch.set_num_threads(1)
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CPU ranks, on a machine with GPUs too
    os.environ["SHARDTUNE_CACHE"] = f"{options.work}/cache"  # without an earlier run's tokens
    measured_with = "; ".join(f"{key}: {value}" for key, value in machine(options).items())
    for section in options.sections:
        module: Any = import_module(f"benchmarks.{section}")
        lines = [f"Measured with {measured_with}", ""]
        for variant in module.variants(options):
            print(f"{section} {', '.join(variant)}:", flush=True)
            failures, figures = len(FAILED), module.measure(options, *variant)
            lines += module.lines(options, figures, *variant) if figures else []
            lines += [f"Failed: {failure}.\n" for failure in FAILED[failures:]]
            write_part(options.results, section, lines)
    if FAILED:
        sys.exit(f"ERROR: {'; '.join(FAILED)} - see the logs in {options.work}")


def write_part(file: Path, section: str, lines: Sequence[str]) -> None:
    """Replace the part of the page on a section, or add one to its end."""
    begin, end = f"<!-- {section} -->", f"<!-- end of {section} -->"
    page = file.read_text(encoding="utf-8") if file.exists() else "# Benchmarks\n"
    before, _, rest = page.partition(f"\n{begin}\n")
    _, _, after = rest.partition(f"{end}\n")
    part = "\n".join(["", begin, "", *lines, end, ""])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(before + part + after, encoding="utf-8")


def machine(options: Namespace) -> dict[str, str]:
    code = (
        "from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in "
        "('torch', 'transformers', 'trl', 'accelerate')))"
    )
    ours = ", ".join(f"{name} {version}" for name, version in versions().items())
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "CPU": f"{cpu()}, {', '.join(_native()) or 'no AVX-512'}",
        "ours": ours.replace("python", "Python"),
        "peers": output_of(options.peers, "-c", code),
        "command": options.command,
    }
