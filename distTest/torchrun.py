"""Runs torchrun for the launch script, and ends with it. Arguments are torchrun's.

SHARDTUNE_LAUNCH_DIR is a folder of this launch alone:

    torchrun.pid the process id of this
    processes    those of the ranks, a line each, as they begin
    watched      there when the ranks of all nodes have met and watch each other
    rank_<r>     where a rank is, while it runs: how it would be described if it ended without a word
    ends         how processes ended: process id, kind and status of waitid(2), a line each
    outcome      exit code and last line, a line each; the first process of the node to fail has the first word
    told         both on one line, for the other nodes, if the launch ends before `watched`
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

import psutil
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from shardtune.watchdog import end_of
from shardtune.world import speak_for

_PR_SET_PDEATHSIG = 1  # prctl(2)
_TICK_S = 1.0
_END_S = 40  # without a process it may hang in a call that hears no signals
# From a signal to torchrun's SIGKILL. How long a save takes is not known before the first: the ranks have deadlines of
# their own for a step and for a save, watch one another, and end at once when they are asked a second time.
_SHUTDOWN_TIMEOUT_S = 2 * 24 * 3600
_OTHERS_SPEAK_S = 5  # the ranks of other nodes, which can say more
_SEE_ABOVE = "see what it said above"
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # torchrun's own


def main(folder: Path, launcher: int) -> int:
    """The exit code. What ends a rank that never came to say it itself becomes the outcome.

    torchrun's report of a failure is not shown, which says less than the ranks' own lines, nor its log, unless LOGLEVEL
    asks for it. Signals that were ignored from the start stay so, for the ranks too.
    """
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    (folder / "torchrun.pid").write_text(f"{os.getpid()}\n", encoding="utf-8")
    os.environ["SHARDTUNE_TORCHRUN_PID"] = str(os.getpid())
    signal.signal(signal.SIGCHLD, lambda *_: _note_end(folder))
    heard = [name for name in _SIGNALS if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    try:
        if (folder / "outcome").exists():  # another node has failed meanwhile
            return 1
        run.main([f"--signals-to-handle={','.join(heard)}", *sys.argv[1:]])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if not (folder / "watched").exists() and not _has_spoken(folder, failure):
            (folder / "outcome").write_text(f"1\n{_ended(rank, failure)}\n", encoding="utf-8")
        return 1
    except SignalException:
        return 1
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        with (folder / "outcome").open("a", encoding="utf-8") as outcome:
            outcome.write(
                f"1\nnode {os.environ['NODE_RANK']} on {socket.gethostname()} started no process: "
                f"{type(error).__name__}: {first_line} - see the logs of the other nodes, and start every node again\n"
            )
        return 1
    finally:
        if os.getppid() != launcher:  # it was killed, and has left this behind
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def _note_end(folder: Path) -> None:
    """Leave for the other ranks how one has ended; torchrun will hear of it, and tells nobody."""
    for number, child in enumerate(psutil.Process().children()):  # several ends may be one signal
        with contextlib.suppress(OSError):
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None:
                with (folder / "ends").open("a", encoding="utf-8") as ends:
                    ends.write(f"{ended.si_pid} {ended.si_code} {ended.si_status}\n")
                is_early = not (folder / "watched").exists() and not {"--nnodes=1", "--nproc_per_node=1"} <= {*sys.argv}
                if ended.si_code == os.CLD_EXITED and ended.si_status == 0 and is_early:
                    # torchrun takes it for success, and would wait for the others.
                    told = (
                        f"1\nlocal rank {number} of node {os.environ['NODE_RANK']} on {_how_it_ended('with code 0')}\n"
                    )
                    with (folder / "outcome").open("a", encoding="utf-8") as outcome:
                        outcome.write(told)
                    os.kill(os.getpid(), signal.SIGTERM)
    if not _has_process():
        _speak_for_the_lost(folder)


def _speak_for_the_lost(folder: Path) -> None:
    """If a rank has ended without a word, and none of this node is left that could say how: to the other nodes too."""
    if (folder / "outcome").exists():
        return
    places = dict[int, tuple[int, str]]()
    for file in folder.glob("rank_*[0-9]"):
        place, limits = file.read_text(encoding="utf-8").splitlines()
        places[int(limits.split()[0])] = int(file.name.removeprefix("rank_")), place
    ended = [int(line.split()[0]) for line in (folder / "ends").read_text(encoding="utf-8").splitlines()]
    if lost := [pid for pid in ended if pid in places]:
        _, place = places[lost[0]]
        who, _, phase = place.partition(", last seen in ")
        what, remedy = end_of(lost[0])
        code, line = speak_for([places[pid][0] for pid in lost], f"{who}: {what}, last seen in {phase} - {remedy}")
        (folder / "outcome").write_text(f"{code}\n{line}\n", encoding="utf-8")
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun would wait for the other nodes if all ended with 0


def _has_spoken(folder: Path, failure: ProcessFailure) -> bool:
    """Whether a rank has come so far that it says itself why it ends, and was not killed."""
    begun = folder / "processes"
    return failure.exitcode > 0 and begun.exists() and str(failure.pid) in begun.read_text(encoding="utf-8").split()


def _ended(rank: int, failure: ProcessFailure) -> str:
    how, remedy = f"with code {failure.exitcode}", _SEE_ABOVE
    if failure.exitcode < 0:
        how = f"by {failure.signal_name()}"
    if failure.exitcode == -signal.SIGKILL:
        remedy = "most often killed for memory, see the kernel's log there"
    return f"rank {rank} on {_how_it_ended(how, remedy)}"


def _how_it_ended(how: str, remedy: str = _SEE_ABOVE) -> str:
    return f"{socket.gethostname()}: ended {how}, before it had met the others - {remedy}; run the same command again"


def _guard(folder: Path, launcher: int) -> None:
    """A rank that is alone on its node has no neighbour that would notice when it is stopped: this kills it, so that
    torchrun ends."""
    orphaned, turns, unchanged = 0, dict[Path, int](), dict[Path, int]()
    while True:
        time.sleep(_TICK_S)
        orphaned = orphaned + 1 if os.getppid() != launcher and not _has_process() else 0
        if orphaned * _TICK_S > _END_S:
            os._exit(1)
        for file in folder.glob("rank_*[0-9]"):
            with contextlib.suppress(OSError, ValueError):
                turn = file.stat().st_mtime_ns
                unchanged[file] = unchanged[file] + 1 if turns.get(file) == turn else 0
                turns[file] = turn
                place, limits = file.read_text(encoding="utf-8").splitlines()
                pid, silent_s = map(int, limits.split())
                if unchanged[file] * _TICK_S > silent_s + _OTHERS_SPEAK_S:
                    with (folder / "outcome").open("a", encoding="utf-8") as outcome:
                        outcome.write(f"1\n{_stopped(place, unchanged[file])}\n")
                    os.kill(pid, signal.SIGKILL)


def _has_process() -> bool:
    """Whether a process that it has started lives; one that waits for its parent to hear of its end does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process().children())
    return False


def _stopped(place: str, seconds: int) -> str:
    return (
        f"{place}: no sign of life for {seconds} s, its process was stopped and has been killed - "
        + os.environ["SHARDTUNE_AGAIN"]
    )


if __name__ == "__main__":
    parent = int(os.environ["SHARDTUNE_LAUNCHER_PID"])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended during the imports above
        raise SystemExit(1)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_TIMEOUT_S))
    # It would end torchrun, and the ranks with it. Not ignored: they would inherit that.
    signal.signal(signal.SIGUSR1, lambda *_: None)
    launch_folder = Path(os.environ["SHARDTUNE_LAUNCH_DIR"])
    threading.Thread(target=_guard, args=(launch_folder, parent), daemon=True).start()
    raise SystemExit(main(launch_folder, parent))
