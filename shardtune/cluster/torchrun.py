"""Runs torchrun for the launch script, and ends with it. Arguments are torchrun's.

SHARDTUNE_LAUNCH_DIR is a folder of this launch alone:

    torchrun.pid the process id of this
    processes    those of the ranks, a line each, as they begin
    watched      there when the ranks of all nodes have met and watch each other
    rank_<r>     where a rank is, while it runs: how it would be described if it ended without a word
    ends         how processes ended: process id, kind and status of waitid(2), a line each
    outcome      exit code and last line, a line each; the first process of the node to fail has the first word
    told         both on one line, for the other nodes, if the launch ends before `watched`

Where the folder is full or gone, whoever has the last word prints it, and the exit code of this says so (SAID).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path

# Where node 0 is the first to end in order, the store's connection would warn of it with a page of C++ frames. torch
# reads it when it is imported, and the ranks do not have it: "2" is what nobody writes for ERROR.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "2")

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shardtune.cluster.local_ranks import SEE_ABOVE, LocalRanks, has_process, how_it_ended

_PR_SET_PDEATHSIG = 1  # prctl(2)
_TICK_S = 1.0
_END_S = 40  # without a process it may hang in a call that hears no signals
# From a signal to torchrun's SIGKILL. How long a save takes is not known before the first: the ranks have deadlines of
# their own for a step and for a save, watch one another, and end at once when they are asked a second time.
_SHUTDOWN_TIMEOUT_S = 2 * 24 * 3600
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # torchrun's own


def main(folder: Path, ranks: LocalRanks, launcher: int) -> int:
    """The exit code, or the negative number of a signal that ended it before a rank could say so. What ends a rank that
    never came to say it itself becomes the outcome.

    torchrun's report of a failure is not shown, which says less than the ranks' own lines, nor its log, unless LOGLEVEL
    asks for it. Signals that were ignored from the start stay so, for the ranks too.
    """
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    with contextlib.suppress(OSError):
        (folder / "torchrun.pid").write_text(f"{os.getpid()}\n", encoding="utf-8")
    os.environ["SHARDTUNE_TORCHRUN_PID"] = str(os.getpid())
    if os.environ["TORCH_CPP_LOG_LEVEL"] == "2":
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    signal.signal(signal.SIGCHLD, lambda *_: ranks.note_ends())
    heard = [name for name in _SIGNALS if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    try:
        if ranks.has_outcome:  # another node has failed meanwhile
            return 1
        run.main([f"--signals-to-handle={','.join(heard)}", *sys.argv[1:]])
    except ChildFailedError as error:
        if ranks.exit_code is None:
            ranks.conclude(1, _ended(*error.get_first_failure(), ranks.have_met))
        return ranks.exit_code or 1
    except SignalException as error:
        return ranks.exit_code or (0 if ranks.have_finished else -error.sigval)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        ranks.conclude(
            1,
            f"node {os.environ['NODE_RANK']} on {socket.gethostname()} started no process: "
            f"{type(error).__name__}: {first_line} - see the logs of the other nodes, and start every node again",
        )
        return ranks.exit_code or 1
    finally:
        if os.getppid() != launcher:  # it was killed, and has left this behind
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _ended(rank: int, failure: ProcessFailure, have_met: bool) -> str:
    how, remedy = f"with code {failure.exitcode}", SEE_ABOVE
    if failure.exitcode < 0:
        how = f"by {failure.signal_name()}"
    if failure.exitcode == -signal.SIGKILL:
        remedy = "most often killed for memory, see the kernel's log there"
    return f"rank {rank} on {how_it_ended(how, remedy, have_met)}"


def _guard(ranks: LocalRanks, launcher: int) -> None:
    orphaned = 0
    while True:
        time.sleep(_TICK_S)
        orphaned = orphaned + 1 if os.getppid() != launcher and not has_process() else 0
        if orphaned * _TICK_S > _END_S:
            os._exit(1)
        ranks.look()
        ranks.end_the_silent(_TICK_S)


if __name__ == "__main__":
    parent = int(os.environ["SHARDTUNE_LAUNCHER_PID"])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended during the imports above
        raise SystemExit(1)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_TIMEOUT_S))
    # It would end torchrun, and the ranks with it. Not ignored: they would inherit that.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    launch_folder = Path(os.environ["SHARDTUNE_LAUNCH_DIR"])
    local_ranks = LocalRanks(launch_folder)
    threading.Thread(target=_guard, args=(local_ranks, parent), daemon=True).start()
    code = main(launch_folder, local_ranks, parent)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    raise SystemExit(code)
