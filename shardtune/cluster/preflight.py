"""The checks before a run, in order: paths between nodes, facts of each node, measurements.

NCCL and gloo need paths between any two nodes: any port, large messages.
"""

import asyncio
import contextlib
import os
from pathlib import Path

import psutil

from shardtune.cluster import compare
from shardtune.cluster.child import Child, Pipe
from shardtune.cluster.control import Control, Message, say, warn
from shardtune.cluster.environment import Environment, existing_part
from shardtune.cluster.node_info import node_facts
from shardtune.distributed.measured import write_measured
from shardtune.errors import UserError

_TIMEOUT_S = 5.0
_LARGE_BYTES = 64 << 10  # more than any MTU holds
_SIZES = (64, _LARGE_BYTES, 1 << 20)
_GATHER_TIMEOUT_S = 60.0


async def require_paths(control: Control, environment: Environment) -> None:
    """Connect every node with every other, and send messages both ways. Raises UserError."""
    server = await asyncio.start_server(_echo, environment.local_ip, 0)
    place = {
        "ip": environment.local_ip,
        "port": server.sockets[0].getsockname()[1],
        "mtu": f"{environment.interface} {psutil.net_if_stats()[environment.interface].mtu}",
    }
    try:
        places = await control.gather("ports that can be reached", place, _GATHER_TIMEOUT_S)
        others = [node for node in range(len(control.nodes)) if node != control.node]
        found = await asyncio.gather(*(_problem(control, node, places) for node in others))
        value = {"problems": [problem for problem in found if problem]}
        await control.gather("connections between the nodes", value, _GATHER_TIMEOUT_S)
    finally:
        server.close()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # asyncio prints a traceback of a handler that is cancelled, as when a launch ends.
    expected = (OSError, EOFError, asyncio.CancelledError)
    with contextlib.suppress(*expected), contextlib.closing(writer):
        for size in _SIZES:  # one write: parts of a large message may be small enough to pass
            writer.write(await reader.readexactly(size))


async def _problem(control: Control, node: int, places: list[Message]) -> str | None:
    me, other = control.me.name, control.nodes[node].name
    ip, port = places[node]["ip"], places[node]["port"]
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(ip, port), _TIMEOUT_S)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else "timed out"
        return (
            f"{me} cannot reach {other} at port {port} of {ip} ({why}): ports other than "
            "MASTER_PORT are blocked, or no way leads there - open all ports between nodes in the "
            "firewall, or set NCCL_SOCKET_IFNAME to an interface whose network all share"
        )
    try:
        for size in _SIZES:
            writer.write(bytes(size))
            left = size
            with contextlib.suppress(OSError):  # a TimeoutError is one
                while left and (received := await asyncio.wait_for(reader.read(left), _TIMEOUT_S)):
                    left -= len(received)
            if left and size == _LARGE_BYTES and not reader.at_eof():
                mtus = f"{places[control.node]['mtu']} here and {places[node]['mtu']} there"
                return (
                    f"small messages pass between {me} and {other}, large ones do not: the MTU "
                    f"({mtus}) is more than the way between them carries - set one that every "
                    "interface and switch takes (ip link set dev INTERFACE mtu N)"
                )
            if left:
                return (
                    f"{me} connects to {other} at port {port} of {ip}, and {size} bytes do not "
                    f"come back within {_TIMEOUT_S:.0f} s: that node is stopped, the way is slow "
                    "or full, or another answers for it - look there, see `ethtool INTERFACE` on "
                    "both, and look for a firewall or proxy on the way"
                )
    finally:
        writer.transport.abort()  # the verdict does not wait for bytes on a slow path
    return None


_FACTS_TIMEOUT_S = 600.0
_SHORT_TIMEOUT_S = 60.0
_MEASURE_TIMEOUT_S = 180.0


def help_agent(pipe: Pipe, environment: Environment) -> None:
    """Import torch and read files while the nodes are meeting, in a process of its own."""
    from shardtune.cluster import microbenchmark  # it imports torch, which takes seconds

    pipe.send(node_facts(environment))
    while True:
        pipe.send(microbenchmark.measure(pipe.recv()))


async def check_nodes(
    control: Control,
    environment: Environment,
    helper: Child,
    logs: Path,
) -> list[Message]:
    """Make all checks, and return every node's facts in the order of their ranks.

    The master port is free then. Raises UserError.
    """
    if len(control.nodes) > 1:
        await require_paths(control, environment)
    facts = await _facts(control, environment, helper)
    names = [node.name for node in control.nodes]
    if problems := compare.problems_of(facts, names):
        raise UserError(*problems)
    if control.node == 0:
        for line in compare.agreement(facts):
            say(line)
    job = {
        "logs": str(logs),
        "node": control.node,
        "name": environment.name,
        "sizes": [fact["processes"] for fact in facts],
        "stages": int(facts[0]["config"]["parallel.stages"]),
        "backend": facts[0]["backend"],
        "address": environment.master_ip,
        "port": environment.store_port,
    }
    helper.pipe.send(job)
    figures = await control.gather(
        "the measurements", asyncio.to_thread(helper.result), _MEASURE_TIMEOUT_S
    )
    if control.node == 0:
        for line in compare.table(facts, figures, [node.host for node in control.nodes]):
            say(line)
        for line in compare.warnings_of(facts, figures, names):
            warn(line)
        assert environment.config is not None
        with contextlib.suppress(OSError):  # the run itself says why it cannot write there
            device = facts[0]["devices"]["the device"]  # the nodes agree on it
            write_measured(Path(environment.config.run.dir), job["sizes"], device, figures)
    return facts


async def _facts(control: Control, environment: Environment, helper: Child) -> list[Message]:
    """Gather all nodes' facts, and whether they see a file that node 0 makes beside run.dir."""
    assert environment.config is not None
    run_dir = Path(environment.config.run.dir).absolute()
    probe = existing_part(run_dir) / f".preflight.{control.nodes[0].token}"

    async def own_facts() -> Message:
        fact = await asyncio.to_thread(helper.result)
        is_shared = any((folder / probe.name).is_file() for folder in (run_dir, *run_dir.parents))
        return fact | {"shares_run_dir": is_shared, "clock_ahead_s": control.clock_ahead_s}

    try:
        if control.node == 0:
            probe.touch()
        await control.gather("a look at run.dir", {}, _SHORT_TIMEOUT_S)
        what = "the facts of its files and devices"
        return await control.gather(what, own_facts(), _FACTS_TIMEOUT_S)
    finally:
        probe.unlink(missing_ok=True)
