"""How this process ends: its exit code and the last line.

Under an agent (the launch scripts) the rank leaves both in its record, and the agent prints the
line when all ranks have ended. Otherwise the rank prints it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import cast

import torch.distributed as dist

from shardtune.distributed.rank_record import RECORDS, STACK, RankRecord, this_rank
from shardtune.distributed.signals import die_with_parent, end_on_signal, ignore_signals
from shardtune.errors import (
    AGAIN,
    Aborted,
    OutOfMemory,
    Preempted,
    RunFailed,
    UserError,
    first_line,
)

STACK_SIGNAL = signal.SIGUSR2
_AGENT_ENDS_US_S = 120.0
_FIRST_RANK_SPEAKS_S = 1.0


def run(main: Callable[[], None]) -> None:
    """Run `main` and end the process with the exit code of its outcome: 0, 2, 75 or 1 (see errors).

    The last line on stderr of a failure is `ERROR: ...`. A problem that all ranks share is printed
    once a node.
    """
    for stream in (sys.stdout, sys.stderr):  # a name may have characters that a terminal lacks
        cast(io.TextIOWrapper, stream).reconfigure(errors="backslashreplace")
    record = _start_record()
    end_on_signal(
        "before the first step, with nothing to save - run the same command again", code=1
    )
    code, lines, is_shared = 0, list[str](), False
    lost_connection, may_restart = False, True
    try:
        main()
    except UserError as error:
        code, lines, is_shared = 2, error.problems, True
        lost_connection = _is_of_a_connection(error.__cause__)
    except Preempted as error:
        code, lines, is_shared = 75, [str(error)], True
    except RunFailed as error:
        code, lines, is_shared = 1, [str(error)], True
    except Aborted as error:
        code, lines, may_restart = error.code, [str(error)], False
        is_shared = not dist.is_initialized()  # all ranks of this node had the same signal
    except SystemExit:
        if not dist.is_initialized():
            raise
        traceback.print_exc()
        code, lines = 1, [_describe(cast(BaseException, sys.exc_info()[1]), record)]
    except Exception as error:
        code, lines = 1, [_describe(error, record)]
        lost_connection = _is_of_a_connection(error)
        if not lost_connection:  # else another rank is the cause, and says so
            with contextlib.suppress(OSError):
                traceback.print_exc()
    ignore_signals()
    outcome = {"code": code, "lines": lines, "may_restart": may_restart}
    record.write_outcome(outcome | {"lost_connection": lost_connection})
    _end(code, lines, is_shared, lost_connection)


def _start_record() -> RankRecord:
    """Show the agent where this rank is, and how to ask for its stack."""
    faulthandler.enable()  # a crash in native code leaves its stack
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A rank that outlives its launcher would hold GPUs and run.dir.
        die_with_parent(os.getppid())
    record = this_rank()
    if STACK in os.environ:
        stack = os.open(os.environ[STACK], os.O_WRONLY | os.O_APPEND)
        faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
        record.has_started = True
        record.write()
    return record


def _end(code: int, lines: list[str], is_shared: bool, lost_connection: bool) -> None:
    if RECORDS in os.environ:
        if lost_connection:
            # The agent knows soon which rank or node is gone, and ends this one.
            time.sleep(_AGENT_ENDS_US_S)
    elif lines:
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        if is_shared and not is_first:
            # The launcher ends the others when one has ended: let the first rank speak before.
            time.sleep(_FIRST_RANK_SPEAKS_S)
        else:
            with contextlib.suppress(OSError):  # `tee` may have ended before
                for line in lines:
                    print(f"ERROR: {line}", file=sys.stderr, flush=True)
    if dist.is_initialized() and code == 0:
        dist.destroy_process_group()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # A failed rank must not wait in interpreter shutdown for collectives that will never complete.
    os._exit(code)


def _is_of_a_connection(error: BaseException | None) -> bool:
    """Whether a rank gets this error when another one is gone."""
    is_gloo = isinstance(error, RuntimeError) and "/gloo/" in str(error)
    return isinstance(error, dist.DistError) or is_gloo


def _describe(error: BaseException, record: RankRecord) -> str:
    # Without gloo's guesses.
    text = first_line(error).partition(" This is typically caused by")[0]
    what = f"{type(error).__name__}: {text}" if str(error) else type(error).__name__
    remedy = f"see the traceback there; {AGAIN}"
    if isinstance(error, OutOfMemory):  # the same command again would end like this
        what, _, remedy = str(error).partition(" - ")
    place = f", in {record.place}" if dist.is_initialized() else ""
    rank = os.environ.get("RANK", "0")
    return f"rank {rank} on {socket.gethostname()}: {what}{place} - {remedy}"
