"""The same global batches of a small model on 1 to 16 ranks, which share this machine's cores."""

from __future__ import annotations

from argparse import Namespace
from statistics import median
from typing import Any

from benchmarks.one import trained_tokens_per_s
from benchmarks.sides import TOLERANCE, Job, Unequal, require_equal_work, require_moving_loss
from benchmarks.small_model import small_model
from benchmarks.tables import describe_losses, section, spread
from distTest.workloads.chats import write_chats

_HEADER = (
    "| ranks | trained tokens/s | MFU | waited for data | memory of a rank | first and last loss |"
)


def measure(options: Namespace) -> dict[str, Any]:
    """Return the figures by the number of ranks.

    Raises:
        Unequal: the losses of two numbers of ranks differ, or hardly move.
    """
    length = options.max_length // 4
    tokens = (max(options.ranks) + 4) * length  # a full row for each rank, and some more
    chats = write_chats(options.work / "many.jsonl", tokens, length, seed=1)
    model = small_model(options.model, options.work / "small")
    more = {"model.init": "random"}
    job = Job(model, chats, length, options.steps, "float32", more=more)
    figures, first = {}, None
    for ranks in options.ranks:
        side = job.run_ours(options.work / f"scaling-{ranks}", ranks=ranks)
        if not side:
            continue
        first = first or side
        require_moving_loss(first, TOLERANCE["float32"])
        try:
            require_equal_work(side, first, TOLERANCE["float32"])
        except Unequal as difference:
            raise Unequal(f"on {ranks} and {options.ranks[0]} ranks {difference}") from difference
        figures[ranks] = {
            "trained_tokens_per_s": trained_tokens_per_s([side]),
            "mfu": side.mfu,
            "data_share": side.data_share,
            "memory_bytes": side.memory_bytes,
            "losses": side.losses,
        }
    return figures


def lines(figures: dict[str, Any], _: dict[str, Any]) -> list[str]:
    rows = [
        f"| {count} | {spread(row['trained_tokens_per_s'])} | {median(row['mfu']):.1%} | "
        f"{row['data_share']:.2%} | {row['memory_bytes'] / 1e9:.2f} GB | "
        f"{row['losses'][0]:.6f} {row['losses'][-1]:.6f} |"
        for count, row in figures.items()
    ]
    counts = ", ".join(str(len(row["trained_tokens_per_s"])) for row in figures.values())
    text = (
        "All ranks share the cores of this machine, one thread each. Medians (smallest to largest) "
        f"of the steps of one run each: {counts}."
    )
    losses = describe_losses("float32", figures, next(iter(figures)))
    title = "The same batches of a small model on 1 to 16 ranks"
    return section(title, text, losses, header=_HEADER, rows=rows)
