"""The results in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import Any

from benchmarks.measure import STEADY, describe_count, describe_losses, spread

MEMORY = (
    "shardtune takes more memory than batches of single chats, because it keeps the "
    "activations of a whole row: "
    "data.packing=false or model.activation_checkpointing=full takes less."
)
NAMES = {
    "ours": "shardtune",
    "trl_packed": "TRL, packed (bfd)",
    "trl_padded": "TRL, padded (batches of 4)",
    "trl_single": "TRL (batches of 1, no padding)",
    "hf_trainer": "HF Trainer (batches of 1, no padding)",
    "transformers_fsdp": "transformers' distributed_config (HF Trainer)",
}


def report(results: dict[str, Any], plot: str | None) -> str:
    """Return the results in Markdown, each part with the run that measured it."""
    runs: list[dict[str, str]] = []
    lines: list[str] = []
    head = results.get("traffic", {}).get("figures", {}).get("head")
    sections = {"one": lambda figures: one_thread_lines(figures, head), "profile": profile_lines}
    sections |= {"two": two_ranks_lines, "traffic": traffic_lines, "head": head_lines}
    sections |= {"scaling": scaling_lines, "records": records_lines, "experts": experts_lines}
    for section, lines_of in sections.items():
        for name, part in results.items():
            if name.split()[0] != section:
                continue
            if part["measured_with"] not in runs:
                runs.append(part["measured_with"])
            title, *rest = lines_of(part["figures"]) if part["figures"] else (f"## {name}", "")
            lines += [title, "", f"Run {runs.index(part['measured_with']) + 1}.", *rest]
            lines += [f"Failed: {each}.\n" for each in part["failed"]]
    described = [
        f"{number}. " + "; ".join(f"{key}: {value}" for key, value in run.items())
        for number, run in enumerate(runs, 1)
    ]
    image = [f"![trained tokens per second]({plot})", ""] if plot else []
    return "\n".join(["# Benchmarks", "", "Runs:", "", *described, "", *image, *lines])


def table(header: str, rows: list[str]) -> list[str]:
    """Return the lines of a table, and an empty one behind them."""
    return [header, "|---" * (header.count("|") - 1) + "|", *rows, ""]


def section(title: str, *paragraphs: str, header: str, rows: list[str]) -> list[str]:
    return [
        f"## {title}",
        "",
        *(line for paragraph in paragraphs for line in (paragraph, "")),
        *table(header, rows),
    ]


def one_thread_lines(figures: dict[str, Any], head: dict[str, int] | None) -> list[str]:
    counts, rows = figures["counts"], figures["rows"]
    dtype, took = counts["dtype"], cpu_seconds_of_step(rows)
    tokens = f"{counts['tokens']} tokens, {counts['trained_tokens']} of them trained"
    lines = [
        f"## {counts['model']}, one pinned thread, {dtype}, {counts['mix']}",
        "",
        f"One step: {counts['documents']} chats, {tokens}, rows of {counts['max_length']} "
        f"(`{counts['mix']}` of distTest/workloads/chats.py). "
        f"{describe_losses(dtype, rows, counts['reference'])} "
        f"{describe_count(counts['rounds'], counts['steps'] - 1)} The last column compares "
        f"{'CPU seconds' if took else 'trained tokens per second'}.",
        "",
        *rate_lines(rows, counts),
    ]
    speeds = {name: median(row["trained_tokens_per_s"]) for name, row in rows.items()}
    shown, middle = [], median(gflops(rows.values()))
    for name, row in rows.items():
        ratio = ""
        if "ours" in rows and took:
            ratio = f"{median(took[name]) / median(took['ours']):.2f} x"
        elif "ours" in rows:
            ratio = f"{speeds['ours'] / speeds[name]:.2f} x"
            if any(unsteady_runs(rows[each], middle) for each in ("ours", name)):
                ratio += " (unsteady core)"
        waited = "not measured" if row["data_share"] is None else f"{row['data_share']:.2%}"
        shares = [100 * share for share in row["share_of_matmul_rate"]]
        shown.append(
            f"| {NAMES[name]} | {spread(took[name]) if took else 'not measured'} | "
            f"{spread(row['trained_tokens_per_s'])} | {spread(shares)} % | "
            f"{spread(gflops([row]))} | "
            f"{row['padding']:.1%} | {row['head_rows'] or own_head_rows(counts, head)} | "
            f"{row['memory_bytes'] / 1e9:.2f} GB | {waited} | {ratio} |"
        )
    header = (
        "| | CPU seconds of a step | trained tokens/s | share of the matmul rate "
        "| that rate, GFLOP/s | padding "
        "| rows through the head "
    )
    header += "| peak memory | waited for data | shardtune is |"
    lines += table(header, shown)
    if "ours" in rows and not head:
        lines += [
            "Rows through the head of shardtune are counted by the section `traffic`, which "
            "has no figures.",
            "",
        ]
    memory = {name: row["memory_bytes"] for name, row in rows.items()}
    if memory.get("ours", 0) > memory.get("hf_trainer", math.inf):
        lines += [MEMORY, ""]
    return lines


def cpu_seconds_of_step(rows: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Return them by side, or nothing for figures of a time at which they were not measured."""
    measured = {name: row["cpu_seconds"] for name, row in rows.items() if row.get("cpu_seconds")}
    return measured if len(measured) == len(rows) else {}


def gflops(rows: Iterable[dict[str, Any]]) -> list[float]:
    return [rate / 1e9 for row in rows for around in row["rates"] for rate in around]


def unsteady_runs(row: dict[str, Any], middle: float) -> list[tuple[int, list[float]]]:
    """Return the runs whose rates, in GFLOP/s, differ from one another or from the median of all
    runs.
    """
    around = [
        (number, [rate / 1e9 for rate in rates])
        for number, rates in enumerate(row["rates"], start=1)
    ]
    return [
        (number, rates)
        for number, rates in around
        if max(middle, *rates) > (1 + STEADY) * min(middle, *rates)
    ]


def rate_lines(rows: dict[str, Any], counts: dict[str, Any]) -> list[str]:
    """Describe the matmul rates around the runs, and name the runs that did not have the same
    core.
    """
    middle = median(gflops(rows.values()))
    limit = 1e9 * middle * counts["trained_tokens"] / counts["flops"]
    lines = [
        f"This thread's matmuls: {spread(gflops(rows.values()))} GFLOP/s. Each run is "
        f"divided by the mean of two rates "
        f"measured right before and right after it. At the median of all rates, matmuls "
        f"alone would train {limit:.1f} "
        "tokens a second: the limit of any side."
    ]
    unsteady = [
        f"run {number} of {NAMES[name]} ({' and '.join(f'{rate:.3g}' for rate in rates)} GFLOP/s)"
        for name, row in rows.items()
        for number, rates in unsteady_runs(row, middle)
    ]
    if unsteady:
        lines += [
            f"**Not all runs had the same core.** The rate before, the rate after and the "
            f"median of all are more than "
            f"{STEADY:.0%} apart for: {', '.join(unsteady)}. Tokens per second of these "
            "runs and their shares of the rate depend on the other work of the machine; ratios of "
            "CPU seconds depend on it less."
        ]
    return [part for line in lines for part in (line, "")]


def profile_lines(figures: dict[str, Any]) -> list[str]:
    total = sum(figures["seconds"].values())
    rows = [f"| {kind} | {seconds / total:.1%} |" for kind, seconds in figures["seconds"].items()]
    text = (
        f"The last step of a run of shardtune on the chats above, under PyTorch's "
        f"profiler: {total:.1f} s."
    )
    title = f"Where the time of shardtune goes, {figures['dtype']}"
    return section(title, text, header="| | share of the step |", rows=rows)


def two_ranks_lines(figures: dict[str, Any]) -> list[str]:
    speeds = {name: median(row["trained_tokens_per_s"]) for name, row in figures["rows"].items()}
    rows = [
        f"| {NAMES[name]} | {spread(row['trained_tokens_per_s'])} | "
        f"{row['memory_bytes'] / 1e9:.2f} GB | "
        + (f"{speeds['ours'] / speeds[name]:.2f} x |" if "ours" in speeds else "|")
        for name, row in figures["rows"].items()
    ]
    header = "| | trained tokens/s | peak memory of a rank | shardtune is |"
    text = describe_losses("float32", figures["rows"], "transformers_fsdp")
    counts = ", ".join(str(len(row["trained_tokens_per_s"])) for row in figures["rows"].values())
    text += f" Medians (smallest to largest) of {counts} figures."
    return section(
        "FSDP over two processes, one core each, float32", text, header=header, rows=rows
    )


def traffic_lines(figures: dict[str, Any]) -> list[str]:
    head = figures["head"]
    rows = [
        f"| {name} | {each['count']} | {each['bytes']} |"
        for name, each in figures["collectives"].items()
    ]
    title = "What one step moves (two ranks, two micro-batches each), float32"
    header = "| | calls | bytes gathered or reduced |"
    text = (
        f"Rows through the head: {head['rows']}, of {head['tokens']} tokens, "
        f"{head['trained_tokens']} of them trained."
    )
    return [*section(title, header=header, rows=rows), text, ""]


def head_lines(figures: dict[str, Any]) -> list[str]:
    rows = [
        f"| {way} | {each['tokens']} | {each['vocabulary']} | {each['width']} | "
        f"{each['peak_bytes'] / 1e9:.3f} GB | "
        f"{(each['peak_bytes'] - each['gradient_bytes']) / 1e9:.3f} GB |"
        for way, each in figures.items()
    ]
    header = (
        "| | tokens | vocabulary | width | peak beyond weights | without the weight's gradient |"
    )
    lines = section("Memory of head and loss, forward and backward", header=header, rows=rows)
    if len(figures) == 2:
        ours, naive = figures["ours"], figures["naive"]
        share = ours["peak_bytes"] / naive["peak_bytes"]
        rest = (ours["peak_bytes"] - ours["gradient_bytes"]) / (
            naive["peak_bytes"] - naive["gradient_bytes"]
        )
        losses = " and ".join(f"{each['loss']:.5f}" for each in figures.values())
        lines += [
            f"shardtune takes {share:.1%} of the naive peak, {rest:.1%} without the weight's "
            f"gradient. On both sides that "
            "gradient, its sum in float32 and the copies that FSDP reduces grow with the "
            "width, so the "
            "share is larger for a wider model."
        ]
        lines += [f"Losses of a token: {losses}.", ""]
    return lines


def scaling_lines(figures: dict[str, Any]) -> list[str]:
    rows = [
        f"| {count} | {spread(row['trained_tokens_per_s'])} | {median(row['mfu']):.1%} | "
        f"{row['data_share']:.2%} | "
        f"{row['memory_bytes'] / 1e9:.2f} GB | {row['losses'][0]:.6f} {row['losses'][-1]:.6f} |"
        for count, row in figures.items()
    ]
    header = (
        "| ranks | trained tokens/s | MFU | waited for data | memory of a rank | first "
        "and last loss |"
    )
    return section(
        "The same batches of a small model on 1 to 16 ranks",
        "All ranks share the cores of this machine, one thread each. Medians (smallest to "
        "largest) of the steps of one "
        f"run each: "
        f"{', '.join(str(len(row['trained_tokens_per_s'])) for row in figures.values())}.",
        describe_losses("float32", figures, next(iter(figures))),
        header=header,
        rows=rows,
    )


def records_lines(figures: dict[str, Any]) -> list[str]:
    def seconds(row: dict[str, Any], state: str) -> str:
        return f"{row['outside_s'][state]:.1f} s" if state in row["outside_s"] else "not measured"

    rows = [
        f"| {count} | {seconds(row, 'tokenised')} | {seconds(row, 'cached')} | "
        f"{spread(row['tokens_per_s'])} |"
        for count, row in figures.items()
    ]
    header = "| records | outside the steps, tokenizing | from the cache | tokens/s |"
    counts = ", ".join(str(len(row["tokens_per_s"])) for row in figures.values())
    text = f"Medians (smallest to largest) of the steps of one run each: {counts}."
    return section(
        "Few records and many, a small model on one thread", text, header=header, rows=rows
    )


def experts_lines(figures: dict[str, Any]) -> list[str]:
    rows = []
    for tokens, row in figures["by_tokens"].items():
        fsdp, expert = (row["seconds"][name] for name in ("fsdp", "expert"))
        ratio = median(fsdp) / median(expert)
        rows.append(f"| {tokens} | {spread(fsdp)} | {spread(expert)} | {ratio:.2f} x |")
    text = (
        "CPU seconds of a micro-batch (forward and backward) per rank, medians (smallest to "
        f"largest), of a small Glm4Moe in float32 with equal losses: {figures['experts']} experts "
        "in each of 3 layers, 4 of them for a token. Weights are gathered and gradients reduced in "
        "each micro-batch. Spread experts save the traffic of weights and gradients, so the fewer "
        "tokens a rank has, the more they gain. CPU seconds do not show the time of a network."
    )
    header = "| tokens per rank | FSDP | `parallel.expert=2` | gain |"
    return section("Spread experts, two ranks", text, header=header, rows=rows)


def own_head_rows(counts: dict[str, Any], head: dict[str, int] | None) -> str:
    """Return the rows of this step through the head, if those counted in another step are all of
    one kind.
    """
    kinds = ("trained_tokens", "tokens")
    return next(
        (str(counts[kind]) for kind in kinds if head and head["rows"] == head[kind]), "not counted"
    )
