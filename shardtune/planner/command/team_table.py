"""A table of the trainings of one or more models that fit on each number of nodes."""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from shardtune.config import Config
from shardtune.errors import DoesNotFit
from shardtune.planner.arithmetic.run_length import run_length
from shardtune.planner.command.options import read_run_config
from shardtune.planner.command.plan_command import (
    machine_of,
    read_planned_config,
    require_runnable,
)
from shardtune.planner.command.text import (
    TIGHT,
    assumed,
    hours,
    number_text,
    spread,
    table,
    verdict,
)
from shardtune.planner.make_plan import bound_plan
from shardtune.planner.mesh import ADAPTERS, as_arguments, mesh_arguments, value_of, with_values
from shardtune.planner.plan import Estimate, Plan
from shardtune.planner.search import Say, Search
from shardtune.planner.simulation.at_once import in_turn
from shardtune.planner.simulation.extrapolate import Simulations
from shardtune.units import gb

_ROWS = 32  # the fewest rows of a step
_MUCH_FASTER = 3.0  # a row names the runs that would be faster by this ratio, but do not fit
_CHECKPOINTING = "model.activation_checkpointing"
_ACCUMULATION = "train.gradient_accumulation_steps"


class _Question(NamedTuple):
    """A model on a number of nodes, and which weights it trains."""

    options: argparse.Namespace
    model: str
    trains: str
    search: Search
    shown: str  # the model in the table
    named: str  # the question in a sentence
    added: dict[str, Any]  # values of keys that the table adds to what is given


def print_team_table(runs: Sequence[argparse.Namespace], say: Say) -> None:
    """Print what fits on each number of nodes, of each model: all weights, and adapters.

    A table by arithmetic comes first, since each simulated row takes seconds.

    Raises:
        UserError: a run would be refused, or nothing fits (code 3).
    """
    models = list(dict.fromkeys(read_run_config(options).model.path for options in runs))
    head, head_about = (_head(models, runs[0], word) for word in ("at least", "about"))
    questions: list[_Question] = []
    may_fit: list[bool] = []
    for question in _questions(runs, models, say):
        if not questions:
            print("By arithmetic, roughly:", *table(head, []), sep="\n")
        questions.append(question)
        rough = question.search.fastest_by_arithmetic()
        may_fit.append(rough is not None)
        print(_line(head, question, rough), flush=True)
    for search in {question.model: question.search for question in questions}.values():
        require_runnable(search.plan.config, search.simulations.model_config, say)
    print("", "Simulated:", *table(head_about, []), sep="\n", flush=True)
    lines: list[str] = []
    fits = False
    say(f"simulating steps for {len(questions)} rows, two rows at a time")
    asked = zip(questions, may_fit, strict=True)
    simulated = in_turn([partial(_simulated, head_about, *each) for each in asked])
    for question, (line, is_found, notes) in zip(questions, simulated, strict=True):
        fits |= is_found
        print(line, flush=True)
        lines += notes
        if not is_found and question.options.nodes == runs[-1].nodes:
            lines += _from_more_nodes(question)
    lines += _assumptions([question.search.plan for question in questions], runs[0])
    print(*dict.fromkeys(lines), sep="\n")
    if not fits:
        raise DoesNotFit(f"nothing of {', '.join(models)} fits - take more or larger GPUs")


def _simulated(
    head: Sequence[str], question: _Question, may_fit: bool
) -> tuple[str, bool, list[str]]:
    """Return the row of the fastest run, whether one fits, and its notes."""
    search = question.search
    plan = search.fastest() if may_fit else None
    notes = [*_notes(question, plan, search.fallen)]
    return _line(head, question, plan), plan is not None, notes


def _notes(question: _Question, plan: Plan | None, fallen: Sequence[Plan]) -> Iterator[str]:
    """Say what `tight` means, and which much faster runs did not fit."""
    if plan and plan.is_tight:
        yield f"tight: {TIGHT}"
    slowest_s = plan.floor_s / _MUCH_FASTER if plan else math.inf
    for faster in (fell for fell in fallen if fell.floor_s < slowest_s):
        yield (
            f"{question.named} on {question.options.nodes} nodes: a step of {faster.floor_s:.3g} s "
            f"fell, by {' '.join(_settings(question, faster))}: {verdict(faster)}"
        )


def _questions(
    runs: Sequence[argparse.Namespace], models: Sequence[str], say: Say
) -> Iterator[_Question]:
    simulations: dict[str, Simulations] = {}
    for options in runs:
        config = read_run_config(options)
        path = config.model.path
        if path not in simulations:
            simulations[path] = Simulations(read_planned_config(config))
        adapters = {} if config.lora.rank else ADAPTERS
        for trains, values in {"all weights": {"lora.rank": None}, "LoRA": adapters}.items():
            search = _search(options, with_values(config, values), simulations[path], say)
            shown = _shown(path, models)
            named = f"{shown}, {trains}" if len(models) > 1 else trains[0].upper() + trains[1:]
            added = {key: n for key, n in values.items() if n != value_of(config, key)}
            if isinstance(options.config, Mapping):  # a model alone, without a file of keys
                added |= {_CHECKPOINTING: config.model.activation_checkpointing}
            yield _Question(options, path, trains, search, shown, named, added)


def _search(
    options: argparse.Namespace, config: Config, simulations: Simulations, say: Say
) -> Search:
    """Return the search for one row of the table."""
    machine = machine_of(options, config)
    if config.origins[_ACCUMULATION] == "default":
        rows = machine.layout(config).rows_per_micro_batch
        config = with_values(config, {_ACCUMULATION: max(1, _ROWS // rows)})
    # The search simulates the meshes that it finds; the one that it begins with may fit nowhere.
    plan = bound_plan(config, simulations.model_config, machine, simulations=simulations)
    return Search(plan, simulations, say=say)


def _shown(model: str, models: Sequence[str]) -> str:
    """Return a model's last name, or all of it where two share that."""
    name = Path(model).name
    return name if [Path(other).name for other in models].count(name) == 1 else model


def _head(models: Sequence[str], options: argparse.Namespace, word: str) -> list[str]:
    """Return the names of the columns. `word`: "about", or "at least" by arithmetic alone."""
    # Padded to the widest cell below it, since each row is printed as soon as it is known.
    widest = max(len(_shown(model, models)) for model in models)
    head = [f"{'model':<{widest}}"] if len(models) > 1 else []
    head += ["nodes", f"{'trains':<11}", "fits ", "peak, GB", "tokens/s about"]
    head += ["step, s at least", "tokens/s at most"]
    if options.tokens or options.price:
        head += [f"hours, {word}"]
    if options.price:
        head += [f"price, {word}"]
    return [*head, "settings"]


def _line(head: Sequence[str], question: _Question, run: Estimate | None) -> str:
    """Return a row of the table. A simulated run also has a time that it takes about."""
    options, trains = question.options, question.trains
    cells = [question.shown] if head[0].startswith("model") else []
    cells += [f"{options.nodes}", trains]
    if not run:
        cells += ["no", *"-" * (len(head) - len(cells) - 1)]
        return [*table(head, [cells])][1]
    about_s = run.about_s if isinstance(run, Plan) else None
    cells += ["tight" if run.is_tight else "yes", gb(run.peak_bytes)]
    cells += [_rate(run, about_s) if about_s else "-", f"{run.floor_s:.3g}"]
    cells += [_rate(run, run.floor_s)]
    if options.tokens or options.price:
        step_s = about_s if isinstance(run, Plan) else run.floor_s
        length = run_length(run.config, run.layout, options.tokens) if step_s else ""
        taken = hours(step_s, run, length) if step_s else 0.0
        money = (options.price or 0.0) * taken * run.machine.ranks
        more = [number_text(taken), number_text(money)] if step_s else ["-", "-"]
        cells += more[: 1 + bool(options.price)]
    return [*table(head, [[*cells, " ".join(_settings(question, run))]])][1]


def _settings(question: _Question, run: Estimate) -> list[str]:
    """Return as arguments all keys of a run that are neither given nor defaults."""
    added = {key: n for key, n in question.added.items() if key not in run.values}
    return [*mesh_arguments(run), *as_arguments(added)]


def _rate(run: Estimate, step_s: float) -> str:
    return f"{float(f'{run.step_tokens / step_s:.3g}'):,.0f}"


def _from_more_nodes(question: _Question) -> Iterator[str]:
    if mesh := question.search.fewest_nodes(more_than=question.options.nodes):
        yield (
            f"{question.named}: from {mesh.machine.nodes} nodes, by arithmetic "
            f"(about {gb(mesh.peak_bytes)} GB with {' '.join(_settings(question, mesh))})"
        )


def _assumptions(plans: Sequence[Plan], options: argparse.Namespace) -> Iterator[str]:
    config = plans[0].config
    yield (
        f"Rows of {config.data.max_length:,} tokens, {_ROWS} or more of them a step where "
        f"{_ACCUMULATION} is not given"
    )
    yield "A plan of a row's settings has its memory by phase, and how tokens/s about are made"
    yield from dict.fromkeys(f"tokens/s about: {spread(plan)}" for plan in plans)
    if options.tokens:
        yield f"Hours and price are of {options.tokens:,.0f} tokens"
    elif options.price:
        yield "Hours and price are of the data, or of 1e9 tokens where it is not on this machine"
    yield assumed(plans[0].machine)
