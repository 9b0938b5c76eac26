"""The plans in docs/planner.md, computed again and written in place.

    python -m benchmarks.plans

Behind a line `<!-- plan --gpu-memory 80 key=value ... -->` stands what `shardtune plan` prints for
config.yaml with these options, without changes that would help. Behind `<!-- plans -->` stands a
table, whose rows name such options in their first column.
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from shardtune.config_io import load_config
from shardtune.log import quiet_libraries
from shardtune.model.files import read_model_config
from shardtune.planner.command import add_arguments, machine_of
from shardtune.planner.plan import Plan, make_plan
from shardtune.planner.text import describe
from shardtune.planner.verdict import verdict

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs/planner.md"
GLM = REPOSITORY / "tests/data/configs/glm-4.5-air"
_BLOCK = re.compile(r"(<!-- plan (.+) -->\n\n```text\n)(?:.*\n)*?(```\n)")
_TABLE = re.compile(r"(<!-- plans -->\n\n\|.*\n\|.*\n)((?:\|.*\n)+)")


def main() -> None:
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def rewritten(text: str) -> str:
    """Return the page with every plan as the code computes it now."""
    text = _BLOCK.sub(lambda match: f"{match[1]}{block(match[2])}{match[3]}", text)
    return _TABLE.sub(lambda match: match[1] + "".join(map(row, match[2].splitlines())), text)


def block(options: str) -> str:
    """Return the lines of one plan."""
    plan = plan_of(options)
    lines = list(describe(plan))
    if verdict(plan) not in lines:
        lines.append(verdict(plan))
    return "".join(f"{line}\n" for line in lines)


def row(line: str) -> str:
    """Return a row of the table for the options in its first column."""
    options = line.split("|")[1].strip()
    plan = plan_of(options.strip("`"))
    cells = [
        options,
        f"{plan.states.total / 1e9:.1f} GB",
        f"{plan.peak_bytes / 1e9:.1f} GB",
        "yes" if plan.fits else "no",
        *(f"{plan.floors_s[part]:.3g} s" for part in ("between nodes", "inside a node")),
        f"{plan.floors_s['arithmetic']:.3g} s",
    ]
    return f"| {' | '.join(cells)} |\n"


def plan_of(options: str, reason: str = "") -> Plan:
    """Plan config.yaml on 2 nodes of 8 GPUs, with the options of `shardtune plan`.

    `reason` is that of `make_plan`.
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = parser.parse_intermixed_args(["--config", "config.yaml", *shlex.split(options)])
    quiet_libraries(is_main=False)
    more = [f"model.path={GLM}", "model.compute_dtype=bfloat16"]
    more.append("run.dir=none")  # whose preflight would give other rates
    config = load_config(REPOSITORY / given.config, [*given.assignments, *more], {})
    machine = machine_of(given, config)
    without_weights = config.model.model_copy(update={"init": "random"})
    model_config = read_model_config(without_weights, config.data.max_length)
    return make_plan(config, model_config, machine, reason=reason)


if __name__ == "__main__":
    main()
