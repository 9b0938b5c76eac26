"""How this process ends: its exit code and the last line.

Under an agent (the launch scripts) the rank leaves both in its record, and the agent prints the
line when all ranks have ended. Otherwise the rank prints it.
"""

import contextlib
import faulthandler
import io
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, cast

import torch.distributed as dist

from shardtune.distributed.rank_record import RECORDS, Failure, this_rank
from shardtune.distributed.signals import die_with_parent, end_on_signal, ignore_signals
from shardtune.errors import AGAIN, Aborted, Ending, OutOfMemory, first_line, print_errors

_AGENT_ENDS_US_S = 120.0
_FIRST_RANK_SPEAKS_S = 1.0  # before a launcher of another kind ends it with this rank


def run(main: Callable[[], None]) -> None:
    """Run `main` and end the process with the exit code of its outcome, and its `ERROR:` lines.

    A problem that all ranks share is printed once a node.
    """
    for stream in (sys.stdout, sys.stderr):  # a name may have characters that a terminal lacks
        cast(io.TextIOWrapper, stream).reconfigure(errors="backslashreplace")
    _start_record()
    end_on_signal(
        "before the first step, with nothing to save - run the same command again", code=1
    )
    failure, is_shared = Failure(0, []), False
    try:
        main()
    except Ending as ending:
        lost_connection = _is_of_a_connection(ending.__cause__)
        may_restart = not isinstance(ending, Aborted)
        failure = Failure(ending.code, ending.problems, lost_connection, may_restart)
        # Before they have met, all ranks of this node have the same signal.
        is_shared = not isinstance(ending, Aborted) or not dist.is_initialized()
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        _leave(ended.code or 0)  # it leaves no outcome, so the agent names this rank
    except Exception as error:
        failure = Failure(1, [_describe(error)], _is_of_a_connection(error))
        if not failure.lost_connection:  # else another rank is the cause, and says so
            with contextlib.suppress(OSError):
                traceback.print_exc()
    ignore_signals()
    this_rank().outcome = failure
    if RECORDS not in os.environ:
        if not (is_shared and failure.lines and _another_rank_has_spoken()):
            print_errors(*failure.lines)
    elif failure.lost_connection:
        # The agent knows soon which rank or node is gone, and ends this one.
        time.sleep(_AGENT_ENDS_US_S)
    if dist.is_initialized() and failure.code == 0:
        dist.destroy_process_group()
    _leave(failure.code)


def _leave(code: int) -> NoReturn:
    """End without interpreter shutdown, which may wait for collectives or abort among threads."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _start_record() -> None:
    faulthandler.enable()  # a crash in native code leaves its stack
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A rank that outlives its launcher would hold GPUs and run.dir.
        die_with_parent(os.getppid())
    if RECORDS in os.environ:
        this_rank().show_stack_when_asked()


def _another_rank_has_spoken() -> bool:
    """Return whether another rank of this node was here before.

    torchrun ends all ranks when one has ended, so the first one speaks. It gives the ranks of a
    node a folder for each attempt.
    """
    if not (error_file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            return False
        time.sleep(_FIRST_RANK_SPEAKS_S)
        return True
    try:
        (Path(error_file).parent.parent / "refused").touch(exist_ok=False)
    except OSError as error:  # twice is better than never
        return isinstance(error, FileExistsError)
    return False


def _is_of_a_connection(error: BaseException | None) -> bool:
    """Return whether a rank gets this error when another one is gone."""
    is_gloo = isinstance(error, RuntimeError) and "/gloo/" in str(error)
    return isinstance(error, dist.DistError) or is_gloo


def _describe(error: Exception) -> str:
    # gloo guesses at causes, and another rank knows its own.
    text = first_line(error).partition(" This is typically caused by")[0]
    what = f"{type(error).__name__}: {text}" if str(error) else text
    remedy = f"see the traceback there; {AGAIN}"
    if _is_of_a_connection(error):
        remedy = f"look for the first error of the other ranks; {AGAIN}"
    if isinstance(error, OutOfMemory):  # the same command again would end like this
        what, _, remedy = str(error).partition(" - ")
    place = f", in {this_rank().place}" if dist.is_initialized() else ""
    rank = os.environ.get("RANK", "0")
    return f"rank {rank} on {socket.gethostname()}: {what}{place} - {remedy}"
