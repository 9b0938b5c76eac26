"""Lines on standard output: whose are shown, and in which form."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.commands import REPOSITORY

from shardtune.log import logger, node_logger, setup_logging


@pytest.mark.parametrize(
    ("is_main", "is_node_main", "shown"),
    [(True, True, "run\nWARNING: hot\nnode\n"), (False, True, "node\n"), (False, False, "")],
)
def test_lines_appear_once_a_run_or_once_a_node(is_main, is_node_main, shown, capsys):
    setup_logging(is_main, is_node_main)
    logger.info("run")
    logger.warning("hot")
    node_logger.info("node")
    assert capsys.readouterr() == (shown, "")


def test_no_library_shows_progress_in_a_log():
    """datasets is imported later, where it is needed."""
    program = """
from shardtune.data.hub import datasets_library
from shardtune.log import quiet_libraries
quiet_libraries(is_main=True)
print(datasets_library().are_progress_bars_disabled())
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
