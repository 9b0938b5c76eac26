"""The checks before a run, in order: paths between nodes, files, machines, measurements."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from pathlib import Path

from shardtune.cluster import compare, microbenchmark, network
from shardtune.cluster.child import Child, Message, Pipe
from shardtune.cluster.connectivity import require_paths
from shardtune.cluster.control import Control, LaunchEnded, say, warn
from shardtune.cluster.environment import Environment, existing_part
from shardtune.cluster.node_info import facts_of_files, facts_of_machine
from shardtune.cluster.rendezvous import Listener

_FACTS_TIMEOUT_S = 600.0
_SHORT_TIMEOUT_S = 60.0
_MEASURE_TIMEOUT_S = 180.0
_PORT_FREE_TIMEOUT_S = 10.0


def start_helper(environment: Environment) -> Child:
    """Fork the process that imports torch and reads files while the nodes are meeting."""
    return Child(environment.name, _help, environment)


def _help(pipe: Pipe, environment: Environment) -> None:
    pipe.send(facts_of_files(environment))
    pipe.send(facts_of_machine(environment))
    while True:
        pipe.send(microbenchmark.measure(pipe.receive()))


async def check_nodes(
    control: Control,
    listener: Listener | None,
    environment: Environment,
    helper: Child,
    logs: Path,
) -> list[Message]:
    """Make all checks, and return every node's facts in the order of their ranks.

    The master port is free then.

    Raises:
        LaunchEnded: on every node, with the reasons why this run cannot start.
    """
    if len(control.nodes) > 1:
        await require_paths(control, environment)
    facts = await _compare(control, environment, helper)
    if listener is not None and environment.port == environment.store_port:
        listener.close()  # rank 0 of the measurement listens there
    await _measure(control, environment, helper, facts, logs)
    if listener is not None:
        listener.close()
    return facts


async def _compare(control: Control, environment: Environment, helper: Child) -> list[Message]:
    names = [node.name for node in control.nodes]
    run_dirs = await _facts_of_run_dir(control, environment)
    what = "the facts of its files (digests of code, data and model)"
    facts = await control.gather(what, asyncio.to_thread(helper.result), _FACTS_TIMEOUT_S)
    for fact, run_dir in zip(facts, run_dirs, strict=True):
        fact |= run_dir
    if problems := compare.problems_of_files(facts, names):
        raise LaunchEnded(2, problems)
    what = "the facts of its devices"
    machines = await control.gather(what, asyncio.to_thread(helper.result), _FACTS_TIMEOUT_S)
    for fact, machine in zip(facts, machines, strict=True):
        fact |= machine
    if problems := compare.problems_of_machines(facts, names):
        raise LaunchEnded(2, problems)
    if control.node == 0:
        for line in compare.agreement(facts):
            say(line)
        for line in compare.warnings_of(facts, names):
            warn(line)
    return facts


async def _facts_of_run_dir(control: Control, environment: Environment) -> list[Message]:
    """Give each node's clock, and whether it sees a file that node 0 makes at run.dir's place."""
    assert environment.config is not None
    run_dir = Path(environment.config.run.dir).absolute()
    folder = existing_part(run_dir)
    probe = folder / f".preflight.{secrets.token_hex(8)}"
    try:
        if control.node == 0:
            with contextlib.suppress(OSError):
                probe.touch()
        value = {"name": probe.name, "up": len(run_dir.parts) - len(folder.parts)}
        first = (await control.gather("the place of run.dir", value, _SHORT_TIMEOUT_S))[0]
        place = Path(*run_dir.parts[: len(run_dir.parts) - first["up"]])
        facts: Message = {
            "shares_run_dir": (place / first["name"]).is_file(),
            "clock_ahead_s": control.clock_ahead_s,
            "clock_error_s": control.clock_error_s,
        }
        return await control.gather("a look at run.dir", facts, _SHORT_TIMEOUT_S)
    finally:
        probe.unlink(missing_ok=True)


async def _measure(
    control: Control,
    environment: Environment,
    helper: Child,
    facts: list[Message],
    logs: Path,
) -> None:
    await control.gather("readiness to measure", {}, _SHORT_TIMEOUT_S)
    job = {
        "logs": str(logs),
        "node": control.node,
        "name": environment.name,
        "sizes": [fact["processes"] for fact in facts],
        "device": facts[0]["device"],
        "address": environment.master_ip,
        "port": environment.store_port,
    }
    helper.pipe.send(job)
    what = "the measurements (all-reduce, GEMM)"
    figures = await control.gather(what, asyncio.to_thread(helper.result), _MEASURE_TIMEOUT_S)
    if control.node == 0:
        devices = [compare.devices(fact) for fact in facts]
        for line in microbenchmark.table(figures, devices, [n.host for n in control.nodes]):
            say(line)
        for line in microbenchmark.warnings_of(figures, facts, [n.name for n in control.nodes]):
            warn(line)
    assert environment.store_port is not None
    is_free: Message = {}
    if control.node == 0:
        is_free = {"problems": await _port_problems(environment.store_port)}
    await control.gather("a free master port", is_free, _SHORT_TIMEOUT_S)


async def _port_problems(port: int) -> list[str]:
    """Wait until the ranks' store can listen there, or say why it cannot."""
    deadline = time.monotonic() + _PORT_FREE_TIMEOUT_S
    while True:
        try:
            network.listen(port).close()
            return []
        except OSError:
            if time.monotonic() > deadline:
                return [
                    f"port {port} was free and is taken now by {network.port_holder(port)} - "
                    "end that, or set another MASTER_PORT on every node"
                ]
            await asyncio.sleep(0.1)
