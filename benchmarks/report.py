"""The results in Markdown."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from measure import TOLERANCE, spread

NAMES = {
    "ours": "shardtune",
    "trl_packed": "TRL, packed (bfd)",
    "trl_padded": "TRL, padded (batches of 4)",
    "trl_single": "TRL (batches of 1, no padding)",
    "hf_trainer": "HF Trainer (batches of 1, no padding)",
    "transformers_fsdp": "transformers' distributed_config (HF Trainer)",
}


def report(found: dict[str, Any], plot: str) -> str:
    """The results in Markdown."""
    lines = ["# Benchmarks", "", *(f"- {key}: {value}" for key, value in found["machine"].items()), ""]
    if "one" in found:
        lines += [f"![trained tokens per second]({plot})", ""]
    for dtype, of_dtype in found.get("one", {}).items():
        lines += one_thread_lines(dtype, of_dtype, found.get("traffic", {}).get("head"))
    if two := found.get("two"):
        lines += ["## FSDP over two processes, one core each, float32", ""]
        lines += ["| | trained tokens/s | peak memory of a rank |", "|---|---|---|"]
        lines += [
            f"| {NAMES[name]} | {spread(row['trained_tokens_per_s'])} | {row['memory_bytes'] / 1e9:.2f} GB |"
            for name, row in two["rows"].items()
        ]
        lines += ["", *refusals(two["refused"])]
    if counted := found.get("traffic"):
        head = counted["head"]
        lines += ["## What one step moves (two ranks, two micro-batches each), float32", ""]
        lines += ["| | calls | bytes gathered or reduced |", "|---|---|---|"]
        lines += [f"| {name} | {each['count']} | {each['bytes']} |" for name, each in counted["collectives"].items()]
        lines += [
            "",
            f"Rows through the head: {head['rows']}, of {head['tokens']} tokens, {head['trained_tokens']} of them",
        ]
        lines[-1] += " trained."
        lines += [""]
    if head := found.get("head"):
        lines += ["## Memory of head and loss, forward and backward", ""]
        lines += [
            "| | tokens | vocabulary | peak beyond weights | without the weight's gradient |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {way} | {each['tokens']} | {each['vocabulary']} | {each['peak_bytes'] / 1e9:.3f} GB | "
            f"{(each['peak_bytes'] - each['gradient_bytes']) / 1e9:.3f} GB |"
            for way, each in head.items()
        ]
        if len(head) == 2:
            share = head["ours"]["peak_bytes"] / head["naive"]["peak_bytes"]
            losses = " and ".join(f"{each['loss']:.5f}" for each in head.values())
            lines += ["", f"Ours takes {share:.1%} of the naive peak. Losses of a token: {losses}."]
        lines += [""]
    if ranks := found.get("scaling"):
        lines += ["## The same batches of a small model on 1 to 16 ranks", ""]
        lines += ["All ranks share the cores of this machine, one thread each.", ""]
        lines += [f"Losses equal to {TOLERANCE['float32']:g} at every step.", ""]
        lines += ["| ranks | trained tokens/s | MFU | waited for data | memory of a rank | first and last loss |"]
        lines += ["|---|---|---|---|---|---|"]
        lines += [
            f"| {count} | {spread(row['trained_tokens_per_s'])} | {median(row['mfu']):.1%} | {row['data_share']:.2%} | "
            f"{row['memory_bytes'] / 1e9:.2f} GB | {row['losses'][0]:.6f} {row['losses'][-1]:.6f} |"
            for count, row in ranks.items()
        ]
        lines += [""]
    if records := found.get("records"):
        lines += ["## Few records and many, a small model on one thread", ""]
        lines += ["| records | outside the steps, tokenising | from the cache | tokens/s |", "|---|---|---|---|"]
        lines += [
            f"| {count} | {row['outside_s']['tokenised']:.1f} s | {row['outside_s'].get('cached', math.nan):.1f} s | "
            f"{spread(row['tokens_per_s'])} |"
            for count, row in records.items()
        ]
        lines += [""]
    if found.get("failed"):
        lines += ["Failed:", "", *(f"- {each}" for each in found["failed"]), ""]
    return "\n".join(lines)


def one_thread_lines(dtype: str, found: dict[str, Any], head: dict[str, int] | None) -> list[str]:
    counts, rows = found["counts"], found["rows"]
    tokens = f"{counts['tokens']} tokens, {counts['trained_tokens']} of them trained"
    lines = [
        f"## {counts['model']}, one pinned thread, {dtype}",
        "",
        f"One step: {counts['documents']} chats, {tokens}, rows of {counts['max_length']}. Losses equal to "
        f"{TOLERANCE[dtype]:g} at every step. This thread's matmuls: "
        f"{spread([rate / 1e9 for rate in found['rates']])} GFLOP/s. Medians (smallest to largest) of "
        f"{counts['rounds']} x {counts['steps'] - 1} steps.",
        "",
        "| | trained tokens/s | share of the matmul rate | padding | rows through the head | peak memory "
        "| waited for data | ours is |",
        "|---|---|---|---|---|---|---|---|",
    ]
    speeds = {name: median(row["trained_tokens_per_s"]) for name, row in rows.items()}
    for name, row in rows.items():
        ratio = f"{speeds['ours'] / speeds[name]:.2f} x" if "ours" in speeds else ""
        waited = "not measured" if row["data_share"] is None else f"{row['data_share']:.2%}"
        shares = [100 * share for share in row["share_of_matmul_rate"]]
        lines.append(
            f"| {NAMES[name]} | {spread(row['trained_tokens_per_s'])} | {spread(shares)} % | {row['padding']:.1%} | "
            f"{row['head_rows'] or rows_of_ours(counts, head)} | {row['memory_bytes'] / 1e9:.2f} GB | {waited} | "
            f"{ratio} |"
        )
    return [*lines, "", *refusals(found["refused"])]


def rows_of_ours(counts: dict[str, Any], head: dict[str, int] | None) -> str:
    """The rows through the head of this step, if those that were counted in another are all of its kind."""
    kinds = ("trained_tokens", "tokens")
    return next((str(counts[kind]) for kind in kinds if head and head["rows"] == head[kind]), "not counted")


def refusals(refused: dict[str, str]) -> list[str]:
    return [f"No figure for {NAMES[name]}: {reason}.\n" for name, reason in refused.items()]
