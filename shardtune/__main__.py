"""The tools: `python -m shardtune COMMAND`."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from shardtune.checkpoint import DamagedCheckpoint, open_checkpoint, verify_checkpoint
from shardtune.checkpoint.export import export_checkpoint
from shardtune.config_io import Parser
from shardtune.data import inspect_data
from shardtune.distributed.signals import end_on_signal
from shardtune.errors import Aborted, RunFailed, UserError
from shardtune.log import quiet_libraries


def main(arguments: Sequence[str]) -> None:
    """Run one command. Raises Refused when it cannot be done."""
    parser = Parser(prog="python -m shardtune", description="Tools around a run of train_fsdp.py.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    what = "show which tokens of the data are trained; needs a tokenizer and no weights"
    inspecting = commands.add_parser("inspect-data", help=what, description=what)
    inspect_data.add_arguments(inspecting)
    what = "read every byte of a checkpoint and compare it with what was saved"
    verifying = commands.add_parser("verify", help=what, description=what)
    verifying.add_argument(
        "directories", type=Path, nargs="+", metavar="CHECKPOINT_DIR", help="all parts of one save"
    )
    what = "write the model of a checkpoint as from_pretrained opens it, one tensor at a time"
    exporting = commands.add_parser("export", help=what, description=what)
    exporting.add_argument(
        "directories", type=Path, nargs="+", metavar="CHECKPOINT_DIR", help="all parts of one save"
    )
    exporting.add_argument(
        "out", type=Path, metavar="OUT_DIR", help="a directory that does not exist yet"
    )
    exporting.add_argument(
        "--dtype", choices=("source", "float32", "bfloat16", "float16"), default="source"
    )
    options, unmatched = parser.parse_known_args(arguments)
    if options.command == "inspect-data":
        inspect(inspecting, options, unmatched)
        return
    if unmatched:
        parser.error(f"unknown option {unmatched[0]}")
    if options.command == "verify":
        if problems := verify_checkpoint(options.directories):
            raise RunFailed(*problems)
    else:
        quiet_libraries(is_main=True)
        export_checkpoint(open_checkpoint(*options.directories), options.out, options.dtype)
        print(f"Saved the model in {options.out}")


def inspect(parser: Parser, options: argparse.Namespace, unmatched: list[str]) -> None:
    for argument in unmatched:
        if argument.startswith("-"):
            parser.error(f"unknown option {argument}")
    if options.records is not None and options.records < 0:
        parser.error(f"--records {options.records} is less than 0")
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
    except UserError as refused:
        for problem in refused.problems:
            print(f"ERROR: {problem}", file=sys.stderr)
        return 2
    except DamagedCheckpoint as damaged:
        for problem in damaged.args:
            print(f"ERROR: {problem} - restore it, or use another checkpoint", file=sys.stderr)
        return 1
    except RunFailed as stopped:
        for problem in stopped.args:
            print(f"ERROR: {problem}", file=sys.stderr)
        return 1
    except Aborted as ended:
        print(f"ERROR: {ended}", file=sys.stderr)
        return ended.code
    except BrokenPipeError:
        # The reader has enough; what is still buffered would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        traceback.print_exc()
        what = str(error).strip().splitlines() or [""]
        print(f"ERROR: {type(error).__name__}: {what[0]} - see the lines above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    end_on_signal("before it was done - run the same command again", code=1)
    sys.exit(run(sys.argv[1:]))
