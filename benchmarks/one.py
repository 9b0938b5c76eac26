"""Time the optimizer steps of shardtune, TRL packed and HF Trainer in turn, on one pinned core."""

import os
from argparse import Namespace
from collections.abc import Iterable
from itertools import product
from statistics import median

from benchmarks.sides import NAMES, Job, Side, counted, describe_losses, in_turns, spread, table
from distTest.workloads.chats import write_chats

_REFERENCE = "hf_trainer"
_SIDES = ("ours", "trl_packed", _REFERENCE)
_TOKENS, _MAX_LENGTH = 1536, 2048  # of a step, about, and of a row
_HEADER = "| | CPU seconds of a step | trained tokens/s | peak memory | shardtune is |"


def variants(options: Namespace) -> Iterable[tuple[str, ...]]:
    return product(options.dtypes, options.mixes)


def measure(options: Namespace, dtype: str, mix: str) -> dict[str, list[Side]]:
    """Run every side in turn on chats of this mix; return the runs that did the same work."""
    chats = write_chats(options.work / f"{mix.replace(' ', '-')}.jsonl", _TOKENS, _MAX_LENGTH, mix)
    core = [max(os.sched_getaffinity(0))]
    job = Job(options.model, chats, _MAX_LENGTH, options.steps, dtype)
    runs: dict[str, list[Side]] = {name: [] for name in _SIDES}
    for turn, name in in_turns(_SIDES, options.rounds):
        run = options.work / f"one-{dtype}-{chats.stem}-{name}-{turn}"
        if done := job.run(name, run, options.peers, ways="cpu_seconds", cores=core):
            runs[name].append(done)
    return counted(runs, _REFERENCE, dtype)


def lines(options: Namespace, figures: dict[str, list[Side]], dtype: str, mix: str) -> list[str]:
    reference = figures[_REFERENCE][0]
    losses = {name: sides[0].losses for name, sides in figures.items()}
    return [
        f"## {options.model.name}, one pinned thread, {dtype}, {mix}",
        "",
        f"One step: {reference.tokens} tokens of chats, {reference.trained_tokens} of them "
        f"trained, rows of {_MAX_LENGTH} (`{mix}` of distTest/workloads/chats.py). "
        f"{describe_losses(dtype, losses, _REFERENCE)} Medians (smallest to largest) of "
        f"{options.rounds} x {options.steps - 1} steps a side. The last column compares CPU "
        "seconds.",
        "",
        *table(_HEADER, [_row(name, figures) for name in figures]),
    ]


def _row(name: str, figures: dict[str, list[Side]]) -> str:
    sides, ratio = figures[name], ""
    if "ours" in figures:
        ratio = f"{median(cpu_seconds(sides)) / median(cpu_seconds(figures['ours'])):.2f} x"
    rates = [side.trained_tokens / seconds for side in sides for seconds in side.seconds]
    memory = median(side.memory_bytes for side in sides) / 1e9
    cells = [NAMES[name], spread(cpu_seconds(sides)), spread(rates), f"{memory:.2f} GB", ratio]
    return f"| {' | '.join(cells)} |"


def cpu_seconds(sides: Iterable[Side]) -> list[float]:
    return [seconds for side in sides for seconds in side.cpu_seconds]
