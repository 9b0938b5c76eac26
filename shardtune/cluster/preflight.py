"""The checks before a run, in order: paths between nodes, facts of each node, measurements."""

import asyncio
import contextlib
from pathlib import Path

from shardtune.cluster import compare
from shardtune.cluster.child import Child, Message, Pipe
from shardtune.cluster.connectivity import require_paths
from shardtune.cluster.control import Control, say, warn
from shardtune.cluster.environment import Environment, existing_part
from shardtune.cluster.node_info import node_facts
from shardtune.distributed.measured import write_measured
from shardtune.errors import UserError

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
