"""What the launch scripts run before torchrun: the nodes meet on the master port, compare everything and try it out.

python -m distTest.preflight [arguments of train_fsdp.py], with the environment of a launch script
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: then modules are looked for beside it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import contextlib
import errno
import io
import os
import secrets
import socket
import tempfile
import time
import traceback

from shardtune.cluster import compare, network
from shardtune.cluster import microbenchmark as ranks
from shardtune.cluster.children import Child, die_with_parent
from shardtune.cluster.connectivity import require_paths
from shardtune.cluster.control import ConnectionLost, Link, Message, NodeHello
from shardtune.cluster.doors import Doors, side_port
from shardtune.cluster.environment import (
    DEFAULTS,
    REPOSITORY,
    Settings,
    existing_part,
    read_settings,
)
from shardtune.cluster.handover import stay_connected
from shardtune.cluster.knocking import Knocking, Welcome, knock
from shardtune.cluster.meeting import Meeting
from shardtune.cluster.node_info import facts_of_files, facts_of_machine, preflight_digest
from shardtune.cluster.reception import Reception
from shardtune.cluster.voice import Voice
from shardtune.distributed.signals import end_on_signal, ignore_signals
from shardtune.errors import Aborted, UserError

_FACTS_TIMEOUT_S = 600.0
_SHORT_TIMEOUT_S = 60.0
_MEASURE_TIMEOUT_S = 180.0
_PORT_FREE_TIMEOUT_S = 10.0
_ASK_TIMEOUT_S = 1.5


def main() -> None:
    """End with 0 where all nodes agree, 2 where the run is refused, 1 else."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    voice = Voice()
    meeting: list[Meeting] = []
    code, problems = 0, []
    try:
        end_on_signal("during the preflight - run the same command again", code=1)
        preflight(voice, meeting)
    except UserError as refused:
        code, problems = 2, refused.problems
    except Aborted as ended:
        code, problems = (2, voice.problems[-1:]) if voice.problems else (1, [str(ended)])
    except Exception as error:
        traceback.print_exc()
        first_line = (str(error).splitlines() or [""])[0]
        code, problems = 1, [f"{type(error).__name__}: {first_line} - see the traceback above"]
    ignore_signals()
    if code == 1 and meeting:
        with contextlib.suppress(UserError):
            meeting[0].refuse(
                f"{meeting[0].members[meeting[0].node].name}: {problem}" for problem in problems
            )
    voice.conclude(problems)
    sys.exit(code)


def preflight(voice: Voice, met: list[Meeting]) -> None:
    """Everything, in order. The meeting is put into `met` as soon as there is one.

    Raises:
        UserError: on every node, with what keeps this run from starting.
    """
    started = time.monotonic()
    if {"-h", "--help"} & set(sys.argv[1:]):
        print((REPOSITORY / "distTest/environment.txt").read_text(encoding="utf-8"), end="")
    for name in ("MASTER_ADDR", "MASTER_PORT", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, DEFAULTS[name])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", os.environ["NCCL_SOCKET_IFNAME"])
    settings = read_settings(os.environ, sys.argv[1:])
    with contextlib.ExitStack() as cleanup:
        helper = None
        logs = cleanup.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        if not settings.problems:
            # Forked before there is a socket: it imports torch and reads files while the nodes are meeting.
            helper = Child(settings.name, _help, settings)
            cleanup.callback(helper.end)
        meeting = meet(settings, voice)
        met.append(meeting)
        assert helper is not None  # with problems nobody meets
        names = [member.name for member in meeting.members]
        if len(names) > 1:
            require_paths(meeting, settings)
        facts = _compare(meeting, helper, settings, voice)
        _measure(meeting, helper, settings, facts, logs, voice)
    who = (
        f"all {len(names)} nodes agree"
        if len(names) > 1
        else "NNODES=1, so this node waits for no other"
    )
    voice.say(f"{who} ({time.monotonic() - started:.0f} s)")
    if len(names) > 1 and (folder := os.environ.get("SHARDTUNE_LAUNCH_DIR")):
        stay_connected(meeting, settings.name, Path(folder))


def meet(settings: Settings, voice: Voice) -> Meeting:
    """Find the other nodes. Raises UserError, after having told them, so far as they can be found."""
    host = socket.gethostname()
    own = tuple(
        problem if settings.is_alone else f"{settings.name}: {problem}"
        for problem in settings.problems
    )
    own_ip, token = settings.own_ip or "?", secrets.token_hex(8)
    me = NodeHello(
        settings.node, settings.nodes, host, own_ip, settings.port, token, preflight_digest(), own
    )
    voice.report(own)
    if own and (settings.is_alone or settings.port is None):
        raise UserError(*own)
    assert settings.port is not None
    if settings.node == 0:
        with contextlib.ExitStack() as opened:
            doors = _open_doors(settings, me, voice)
            opened.callback(doors.close)
            is_other_possible = (
                not (settings.owns_master and doors.has_main) and settings.master_ip is not None
            )
            ask = (lambda: _ask(me, settings)) if is_other_possible else None
            if voice.problems and settings.is_alone:
                raise UserError(*voice.problems)
            reception = Reception(
                me, settings.master, settings.port, doors, settings.join_timeout_s, voice, ask
            )
            meeting = reception.wait_for_all()
            opened.pop_all()
            return meeting
    if settings.master_ip is None:
        raise UserError(*own)
    is_own = settings.owns_master and settings.interface != "lo"
    where = settings.master_named, settings.master_ip, settings.port
    return Knocking(me, *where, is_own, settings.join_timeout_s, voice).meet()


def _open_doors(settings: Settings, me: NodeHello, voice: Voice) -> Doors:
    """Listen at all addresses, whatever is wrong: nodes that come are to be told."""
    assert settings.port is not None
    doors = Doors(me)
    try:
        doors.open(settings.port, is_main=True)
    except OSError as error:
        by = (
            f"taken by {network.port_holder(settings.port)}"
            if error.errno == errno.EADDRINUSE
            else f"not open: {error.strerror}"
        )
        voice.report(
            [
                f"port {settings.port} of {me.name} is {by} - end that (a stale process of the last run?), or set "
                "another MASTER_PORT on every node"
            ]
        )
    if not settings.is_alone:
        with contextlib.suppress(OSError):  # it only helps to find out
            doors.open(side_port(settings.port), is_main=False)
    return doors


def _ask(me: NodeHello, settings: Settings) -> list[str]:
    """A node 0 that cannot be the master asks whoever is, as a second node 0; why that refuses, if there is one."""
    assert settings.master_ip is not None and settings.port is not None
    found = knock(me, settings.master_ip, settings.port, _ASK_TIMEOUT_S)
    if not isinstance(found, Welcome):
        return []
    with contextlib.suppress(ConnectionLost, TimeoutError):
        messages = found.behind or found.link.receive(_ASK_TIMEOUT_S)
        return [str(problem) for problem in messages[0].get("problems", ())]
    return []


def _compare(meeting: Meeting, helper: Child, settings: Settings, voice: Voice) -> list[Message]:
    """Every node's facts. Raises Refused on every node alike, since all of them have all facts."""
    names = [member.name for member in meeting.members]
    looks = _look_at_each_other(meeting, settings)
    facts = meeting.gather(
        "the facts of its files (digests of code, data and model)", helper, _FACTS_TIMEOUT_S
    )
    for fact, look in zip(facts, looks, strict=True):
        fact |= look
    if problems := compare.problems_of_files(facts, names):
        raise UserError(*problems)
    machines = meeting.gather("the facts of its devices", helper, _FACTS_TIMEOUT_S)
    for fact, machine in zip(facts, machines, strict=True):
        fact |= machine
    if problems := compare.problems_of_machines(facts, names):
        raise UserError(*problems)
    if meeting.node == 0:
        for line in compare.agreement(facts):
            voice.say(line)
        for line in compare.warnings_of(facts, names):
            voice.warn(line)
    return facts


def _look_at_each_other(meeting: Meeting, settings: Settings) -> list[Message]:
    """Of each node how its clock goes, and whether it sees a file that node 0 makes where run.dir is, or will be."""
    assert settings.config is not None
    run_dir = Path(settings.config.run.dir).absolute()
    folder = existing_part(run_dir)
    probe = folder / f".preflight.{secrets.token_hex(8)}"
    try:
        if meeting.node == 0:
            with contextlib.suppress(OSError):
                probe.touch()
        own: Message = {"name": probe.name, "up": len(run_dir.parts) - len(folder.parts)}
        of_first = meeting.gather("the place of run.dir", own, _SHORT_TIMEOUT_S)[0]
        place = Path(*run_dir.parts[: len(run_dir.parts) - of_first["up"]])
        seen: Message = {
            "shares_run_dir": (place / of_first["name"]).is_file(),
            "clock_ahead_s": meeting.clock_ahead_s,
            "clock_error_s": meeting.clock_error_s,
        }
        return meeting.gather("a look at run.dir", seen, _SHORT_TIMEOUT_S)
    finally:
        probe.unlink(missing_ok=True)


def _measure(
    meeting: Meeting,
    helper: Child,
    settings: Settings,
    facts: list[Message],
    logs: str,
    voice: Voice,
) -> None:
    meeting.close_doors()  # rank 0 of the measurement listens there
    meeting.gather("readiness to measure", {}, _SHORT_TIMEOUT_S)
    job = {
        "logs": logs,
        "node": meeting.node,
        "name": settings.name,
        "sizes": [fact["processes"] for fact in facts],
        "device": facts[0]["device"],
        "address": settings.master_ip,
        "port": settings.port,
    }
    helper.link.send(job)
    figures = meeting.gather("the measurements (all-reduce, GEMM)", helper, _MEASURE_TIMEOUT_S)
    if meeting.node == 0:
        devices = [compare.devices(fact) for fact in facts]
        for line in ranks.table(figures, devices, [member.host for member in meeting.members]):
            voice.say(line)
        for line in ranks.slow_devices(figures, [member.name for member in meeting.members]):
            voice.warn(line)
        assert settings.port is not None
        _require_free(settings.port)
    meeting.gather("the end", {}, _SHORT_TIMEOUT_S)


def _require_free(port: int) -> None:
    """Return when torchrun can listen there. Raises Refused where it never could."""
    deadline = time.monotonic() + _PORT_FREE_TIMEOUT_S
    while True:
        try:
            network.listen(port).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"port {port} was free and is taken now by {network.port_holder(port)} - end that, or set another "
                    "MASTER_PORT on every node"
                ) from error
            time.sleep(0.1)


def _help(link: Link, settings: Settings) -> None:
    """The process that imports torch: this node's facts, and later its measurements."""
    link.send(facts_of_files(settings))
    link.send(facts_of_machine(settings))
    while True:
        for job in link.receive(24 * 3600.0):
            link.send(ranks.measure(job))


if __name__ == "__main__":
    if "SHARDTUNE_LAUNCHER_PID" in os.environ:
        die_with_parent(os.getppid())
    main()
