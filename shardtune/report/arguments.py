"""The arguments of `shardtune inspect-data`. Imports nothing heavy."""

import argparse
from pathlib import Path

RECORDS_IN_PICTURE = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", required=True, type=Path, metavar="FILE", help="the run's configuration"
    )
    parser.add_argument(
        "--records",
        type=int,
        metavar="N",
        help="show the first N records of data.train "
        f"(default: {RECORDS_IN_PICTURE}; all of them with --json)",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="show what the run in run.dir trains in step N instead",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="one object a line per sequence, before packing: "
        '{"record": n, "input_ids": [...], "trained": [...], "place": "FILE:LINE"}',
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page of the first records instead, with trained text in colour",
    )
    parser.add_argument(
        "assignments", nargs="*", metavar="section.key=value", help="override the configuration"
    )
