"""A signal ends the process, wherever it lands."""

from __future__ import annotations

import signal
import sys

import pytest
from helpers.commands import completed

PROGRAM = """
import os, signal, sys, time, weakref
from shardtune.__main__ import code_of
from shardtune.distributed.signals import end_on_signal

class Signals:
    def __del__(self):
        os.kill(os.getpid(), {number})

def work():
    owner = Signals()
    weakref.finalize(owner, os.kill, os.getpid(), {number})
    del owner
    time.sleep(60)

end_on_signal("before it was done - run it again", code=7)
sys.exit(code_of(work))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_lands_in_a_finalizer_ends_the_process(number):
    """Python drops what a finalizer raises."""
    program = PROGRAM.format(number=int(number))
    done = completed([sys.executable, "-c", program], timeout_s=10)
    line = f"ERROR: ended by {number.name} before it was done - run it again\n"
    assert (done.returncode, done.stderr) == (7, line)
