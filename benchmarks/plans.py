"""Write the plans and verdicts in docs/planner.md and memory.md anew.

After `<!-- plan OPTIONS -->` come the lines of `shardtune plan` for config.yaml with these options,
without changes that would help. After `<!-- plans -->` comes a table whose first column has such
options. After `<!-- verdicts -->` comes a table whose first three columns, model, machine and
settings, are the question. After `<!-- team ARGUMENTS -->` comes the table that `shardtune plan`
prints with these arguments.
"""

import contextlib
import io
import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from distTest.workloads.script import REPOSITORY
from shardtune.config_io import load_config
from shardtune.log import quiet_libraries
from shardtune.model.source.files import read_model_config
from shardtune.planner.command.options import add_arguments, add_plan_arguments, split_runs
from shardtune.planner.command.plan_command import machine_of
from shardtune.planner.command.team_table import print_team_table
from shardtune.planner.command.text import describe, verdict
from shardtune.planner.make_plan import make_plan
from shardtune.planner.plan import Plan
from shardtune.planner.search import silent

PAGE = REPOSITORY / "docs/planner.md"
MEMORY = REPOSITORY / "docs/memory.md"
CONFIGS = REPOSITORY / "tests/data/configs"
_BLOCK = re.compile(r"(<!-- plan (.+) -->\n\n```text\n)(?:.*\n)*?(```\n)")
_TEAM = re.compile(r"(<!-- team (.+) -->\n\n```text\n)(?:.*\n)*?(```\n)")
_TABLE = r"(<!-- {} -->\n\n\|.*\n\|.*\n)((?:\|.*\n)+)"
PLANS, VERDICTS = (re.compile(_TABLE.format(name)) for name in ("plans", "verdicts"))
# All verdicts have defaults of other keys, and InfiniBand of 400 Gb/s a node.
_COMMON = (
    "--config /dev/null --nic-gbps 400 data.train=unread data.max_length=4096 "
    "train.gradient_accumulation_steps=2"
)


def add_options(parser: ArgumentParser) -> None:
    """Add no options."""


def main(_: Namespace) -> None:
    for page in (PAGE, MEMORY):
        text = with_plans(page.read_text(encoding="utf-8"))
        page.write_text(with_rows(VERDICTS, verdict_row, text), encoding="utf-8")


def with_plans(text: str) -> str:
    """Return the page with every plan as the code computes it now."""
    text = _BLOCK.sub(lambda match: f"{match[1]}{block(match[2])}{match[3]}", text)
    text = _TEAM.sub(lambda match: f"{match[1]}{team_of(match[2])}{match[3]}", text)
    return with_rows(PLANS, row, text)


def with_rows(table: re.Pattern[str], row_of: Callable[[str], str], text: str) -> str:
    return table.sub(lambda match: match[1] + "".join(map(row_of, match[2].splitlines())), text)


def block(options: str) -> str:
    """Return the lines of one plan."""
    plan = plan_of(options)
    return "".join(f"{line}\n" for line in [verdict(plan), *describe(plan)])


def team_of(arguments: str) -> str:
    """Return the simulated table of `shardtune plan` for a model on several numbers of nodes."""
    parser = ArgumentParser()
    add_plan_arguments(parser)
    model, *options = shlex.split(arguments)
    given = parser.parse_intermixed_args([f"{CONFIGS / model}", *options])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_team_table(split_runs(given), silent)
    return printed.getvalue().partition("Simulated:\n")[2]


def row(line: str) -> str:
    """Return a row of the table of plans for the options in its first column."""
    options = line.split("|")[1].strip()
    plan = plan_of(options.strip("`"))
    cells = [options, *_memory(plan, " GB")]
    for part in ("between nodes", "inside a node", "arithmetic"):
        cells.append(f"{plan.floors_s[part]:.3g} s")
    return f"| {' | '.join(cells)} |\n"


def verdict_row(line: str) -> str:
    """Return a row of the table of verdicts for the question in its first columns."""
    model, machine, settings = (cell.strip() for cell in line.split("|")[1:4])
    nodes, ranks, memory = re.findall(r"\d+", machine)
    options = f"--nodes {nodes} --gpus-per-node {ranks} --gpu-memory {memory}"
    plan = plan_of(f"{_COMMON} {options} model.path={CONFIGS / model} {settings.strip('`')}")
    bound_by = max(plan.floors_s, key=lambda part: plan.floors_s[part])
    cells = [model, machine, settings, *_memory(plan), f"{plan.floor_s:.3g} s, {bound_by}"]
    return f"| {' | '.join(cells)} |\n"


def _memory(plan: Plan, unit: str = "") -> list[str]:
    sizes = [f"{size / 1e9:.1f}{unit}" for size in (plan.states.total, plan.needed_bytes)]
    return [*sizes, "yes" if plan.fits else "no"]


def plan_of(options: str, planned: Callable[..., Plan] = make_plan) -> Plan:
    """Plan config.yaml on 2 nodes of 8 GPUs, or what the options of `shardtune plan` say.

    `planned`: `make_plan`, or `bound_plan` where shapes are enough.
    """
    parser = ArgumentParser()
    add_arguments(parser)
    given = parser.parse_intermixed_args(["--config", "config.yaml", *shlex.split(options)])
    quiet_libraries(is_main=False)
    before = [f"model.path={CONFIGS}/glm-4.5-air", "model.compute_dtype=bfloat16"]
    before.append("run.dir=none")  # a real one may have a preflight's rates
    config = load_config(REPOSITORY / given.config, [*before, *given.assignments], {})
    machine = machine_of(given, config)
    without_weights = config.model.model_copy(update={"init": "random"})
    model_config = read_model_config(without_weights)
    return planned(config, model_config, machine)
