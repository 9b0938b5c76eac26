"""The tools: `python -m shardtune COMMAND`."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence

from shardtune import inspect_data
from shardtune.console import Parser
from shardtune.errors import Refused


def main(arguments: Sequence[str]) -> None:
    """Run one command. Raises Refused when it cannot be done."""
    parser = Parser(prog="python -m shardtune", description="Tools around a run of train_fsdp.py.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    what = "show which tokens of the data are trained; needs a tokenizer and no weights"
    inspecting = commands.add_parser("inspect-data", help=what, description=what)
    inspect_data.add_arguments(inspecting)
    options, unmatched = parser.parse_known_args(arguments)
    for argument in unmatched:
        if argument.startswith("-"):
            inspecting.error(f"unknown option {argument}")
    if options.records is not None and options.records < 0:
        inspecting.error(f"--records {options.records} is less than 0")
    # argparse gives up positional arguments that stand behind a later option.
    assignments = [*options.assignments, *unmatched]
    inspect_data.inspect_data(options.config, assignments, options.records, options.json)


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code, after an `ERROR:` line for everything that went wrong."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        main(arguments)
        sys.stdout.flush()
    except Refused as refused:
        for problem in refused.problems:
            print(f"ERROR: {problem}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has enough; what is still buffered would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (Exception, KeyboardInterrupt) as error:
        traceback.print_exc()
        what = str(error).strip().splitlines() or [""]
        print(f"ERROR: {type(error).__name__}: {what[0]} - see the lines above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
