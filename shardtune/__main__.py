"""The tools around a run: `shardtune COMMAND ...`, the same as `python -m shardtune COMMAND ...`.

Each command imports what it needs: torch takes seconds, and a missing package is reported first.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardtune.errors import Ending, RunFailed, first_line, print_errors, require_packages
from shardtune.garbage_collection import imports_without_gc

if TYPE_CHECKING:
    from shardtune.config_io import Parser


def main() -> None:
    """Run the command in this process's arguments and exit with its code."""
    require_packages()
    from shardtune.distributed.signals import end_on_signal

    end_on_signal("before it was done - run the same command again", code=1)
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command, print an `ERROR:` line for each problem, and return the exit code."""
    return code_of(lambda: _run_command(arguments))


def code_of(work: Callable[[], None]) -> int:
    """Run `work`, print an `ERROR:` line for each problem, and return the exit code."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        work()
        sys.stdout.flush()
    except Ending as ending:
        print_errors(*ending.problems)
        return ending.code
    except BrokenPipeError:
        # The reader has enough. Buffered text would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        traceback.print_exc()
        print_errors(f"{type(error).__name__}: {first_line(error)} - see the lines above")
        return 1
    return 0


def _run_command(arguments: Sequence[str]) -> None:
    from shardtune.config_io import Parser

    parser = Parser(
        prog="shardtune",
        usage="shardtune COMMAND ...",
        description="Tools around a run of train_fsdp.py.",
        epilog="\n".join(f"{name:<15}{help_}" for name, (_, help_) in COMMANDS.items()),
        formatter_class=RawDescriptionHelpFormatter,
    )
    help_ = "one of those below; shardtune COMMAND --help says more"
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help=help_)
    name = parser.parse_args(arguments[:1] or ["--help"]).command
    command, help_ = COMMANDS[name]
    command(Parser(prog=f"shardtune {name}", description=help_), arguments[1:])


def _train(parser: Parser, arguments: Sequence[str]) -> None:
    from shardtune.cluster.one_machine import add_arguments, train

    add_arguments(parser)
    train(parser.parse_intermixed_args(arguments))  # an assignment may stand behind an option


def _inspect_data(parser: Parser, arguments: Sequence[str]) -> None:
    add = parser.add_argument
    add("--config", required=True, type=Path, metavar="FILE", help="the run's configuration")
    records_help = "show the first N records of data.train (default: 3; all of them with --json)"
    add("--records", type=int, metavar="N", help=records_help)
    step_help = "show what the run in run.dir trains in step N instead"
    add("--step", type=int, metavar="N", help=step_help)
    json_help = (
        "one object a line per sequence, before packing: "
        '{"record": n, "input_ids": [...], "trained": [...], "place": "FILE:LINE"}'
    )
    add("--json", action="store_true", help=json_help)
    html_help = "write a page of the first records instead, with trained text in colour"
    add("--html", type=Path, metavar="FILE", help=html_help)
    assignments_help = "override the configuration"
    add("assignments", nargs="*", metavar="section.key=value", help=assignments_help)
    options = parser.parse_intermixed_args(arguments)  # an assignment may stand behind an option
    if options.records is not None and options.records < 0:
        parser.error(f"--records {options.records} is less than 0")
    if options.step is not None and options.step < 1:
        parser.error(f"--step {options.step} is less than 1")
    if options.step is not None and options.html:
        parser.error("--step prints records, and --html writes a page of the first ones")
    if options.step is not None and options.records is not None:
        parser.error("--step prints all records of a step, and --records the first ones")
    if options.html and options.json:
        parser.error("--html and --json are two forms of the same")
    if options.step is not None:
        with imports_without_gc():
            from shardtune.report.step_records import show_step

        show_step(options.config, options.assignments, options.step, options.json)
        return
    if not options.html:
        with imports_without_gc():
            from shardtune.report.inspect_data import inspect_data

        inspect_data(options.config, options.assignments, options.records, options.json)
        return
    with imports_without_gc():
        from shardtune.report.data_page import write_data_page

    for line in write_data_page(options.config, options.assignments, options.records, options.html):
        print(line)
    print(f"Page: {options.html.resolve()}")


def _verify(parser: Parser, arguments: Sequence[str]) -> None:
    _add_directories(parser, "exported models, and all parts of one checkpoint")
    options = parser.parse_args(arguments)
    with imports_without_gc():
        from shardtune.checkpoint.verify import verify

    if problems := verify(options.directories):
        raise RunFailed(*problems)


def _export(parser: Parser, arguments: Sequence[str]) -> None:
    _add_directories(parser, "all parts of one save")
    out_help = "a directory that does not exist yet"
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help=out_help)
    dtypes = ("source", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, default="source")
    options = parser.parse_args(arguments)
    with imports_without_gc():
        from shardtune.checkpoint.export.write import export_checkpoint
        from shardtune.log import quiet_libraries

    quiet_libraries(is_main=True)
    export_checkpoint(options.directories, options.out, options.dtype)


def _add_directories(parser: Parser, help_: str) -> None:
    parser.add_argument("directories", type=Path, nargs="+", metavar="CHECKPOINT_DIR", help=help_)


def _plan(parser: Parser, arguments: Sequence[str]) -> None:
    from shardtune.planner.command.options import add_plan_arguments, read_run_config, split_runs

    add_plan_arguments(parser)
    runs = split_runs(parser.parse_intermixed_args(arguments))
    for each in runs:
        read_run_config(each)  # refused before torch is imported
    from shardtune.planner.search import say

    say("importing PyTorch and transformers")
    with imports_without_gc():
        from shardtune.planner.command.plan_command import plan_run
        from shardtune.planner.command.team_table import print_team_table
    if len(runs) == 1 and isinstance(runs[0].config, Path):
        plan_run(runs[0], say)
    else:
        print_team_table(runs, say)


def _ask(parser: Parser, arguments: Sequence[str]) -> None:
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="a directory or a hub id")
    question_help = "one question; without it each line of the input is one, on its own"
    parser.add_argument("question", nargs="?", metavar="QUESTION", help=question_help)
    options = parser.parse_args(arguments)
    if options.question is not None and not options.question.strip():
        parser.error("QUESTION is empty")
    with imports_without_gc():
        from shardtune.ask import ask

    ask(options.model, options.question)


def _report(parser: Parser, arguments: Sequence[str]) -> None:
    from shardtune.report.page import add_arguments, report

    add_arguments(parser)
    report(parser.parse_args(arguments))


def _watch(parser: Parser, arguments: Sequence[str]) -> None:
    from shardtune.report.watch import add_arguments, watch

    add_arguments(parser)
    watch(parser.parse_args(arguments))


def _config_schema(parser: Parser, arguments: Sequence[str]) -> None:
    from shardtune.config_schema import json_schema, markdown

    parser.add_argument("--markdown", action="store_true", help="a page for people instead")
    print(markdown() if parser.parse_args(arguments).markdown else json_schema(), end="")


COMMANDS = {
    "train": (_train, "train on this machine: all its GPUs, or two CPU processes"),
    "inspect-data": (_inspect_data, "show which tokens are trained; needs no weights"),
    "verify": (_verify, "compare every byte of checkpoints and models with digests"),
    "export": (_export, "write a checkpoint's model as from_pretrained opens it"),
    "plan": (_plan, "say whether a run fits, and what it takes, from config.json"),
    "ask": (_ask, "answer a question by a run's model, or by any model"),
    "report": (_report, "write a page of a run's curves, or of several runs"),
    "watch": (_watch, "show a run in this terminal, from its directory"),
    "config-schema": (_config_schema, "print the JSON schema of the configuration"),
}

if __name__ == "__main__":
    main()
