"""The verdicts in docs/planner.md, computed again and written in place.

    python -m benchmarks.verdicts

Behind the line `<!-- verdicts -->` stands a table. The first three columns of a row, the model, the
machine and settings, are the question; the others are the answer.
"""

from __future__ import annotations

import re
from pathlib import Path

from transformers import AutoConfig

from shardtune.config_io import load_config
from shardtune.log import quiet_libraries
from shardtune.planner.machine import Machine
from shardtune.planner.plan import Plan, make_plan

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs/planner.md"
CONFIGS = REPOSITORY / "tests/data/configs"
TABLE = re.compile(r"(<!-- verdicts -->\n\n\|.*\n\|.*\n)((?:\|.*\n)+)")
# Of all rows: the defaults of every other key.
_COMMON = [
    "data.train=unread",
    "model.compute_dtype=bfloat16",
    "data.max_length=4096",
    "train.gradient_accumulation_steps=2",
]
_NODE_GBPS, _RANK_GBPS, _TFLOPS = 400, 3600, 989  # H100 and InfiniBand of 400 Gb/s a node


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        TABLE.sub(lambda table: table[1] + "".join(map(row, table[2].splitlines())), text),
        encoding="utf-8",
    )


def row(line: str) -> str:
    """Return a row of the table for the question in its first columns."""
    model, machine, settings = (cell.strip() for cell in line.split("|")[1:4])
    plan = plan_of(model, machine, settings.strip("`").split())
    bound_by = max(plan.floors_s, key=lambda part: plan.floors_s[part])
    cells = [
        model,
        machine,
        settings,
        f"{plan.states.total / 1e9:.1f}",
        f"{plan.peak_bytes / 1e9:.1f}",
        "yes" if plan.fits else "no",
        f"{plan.floor_s:.3g} s, {bound_by}",
    ]
    return f"| {' | '.join(cells)} |\n"


def plan_of(model: str, machine: str, settings: list[str]) -> Plan:
    """Plan a model of tests/data/configs on a machine such as `2 x 8 x 80 GB`."""
    quiet_libraries(is_main=False)
    nodes, ranks, memory = re.findall(r"\d+", machine)
    path = CONFIGS / model
    # No file of ours: the defaults of every key.
    config = load_config(Path("/dev/null"), [f"model.path={path}", *_COMMON, *settings], {})
    return make_plan(
        config,
        AutoConfig.from_pretrained(path),
        Machine(
            nodes=int(nodes),
            ranks_per_node=int(ranks),
            memory_bytes=int(memory) * 1e9,
            node_bytes_per_s=_NODE_GBPS * 1e9 / 8,
            rank_bytes_per_s=_RANK_GBPS * 1e9 / 8,
            flops_per_s=_TFLOPS * 1e12,
        ),
    )


if __name__ == "__main__":
    main()
