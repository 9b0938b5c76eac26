"""Rehearse a run on this machine: the launch scripts as several nodes, one of which is killed.

The nodes have CPU processes and a random tiny model of the configured architecture. The same
commands resume then.

python -m distTest.rehearse [--nodes 2] [--procs-per-node 8] [--config FILE] [--loopback]
    [-- section.key=value ...]
"""

import contextlib
import json
import shlex
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from distTest.rehearse import namespaces
from distTest.rehearse.node_processes import CheckFailed, NodeProcesses, kill, launched
from shardtune.__main__ import code_of
from shardtune.cluster.environment import DEFAULTS, REPOSITORY
from shardtune.cluster.network import free_port
from shardtune.config_io import Parser, load_config
from shardtune.distributed.layout import Layout
from shardtune.distributed.signals import end_on_signal
from shardtune.errors import RunFailed

STEPS, STEPS_BETWEEN_SAVES = 18, 7


def main(arguments: Sequence[str]) -> None:
    """Rehearse in a temporary folder, which is kept if a check fails.

    Raises UserError, RunFailed.
    """
    end_on_signal("with all that it had started - run it again", code=1)
    options = _read_arguments(arguments)
    folder = Path(tempfile.mkdtemp(prefix="shardtune-rehearsal-"))
    with contextlib.ExitStack() as at_end:
        at_end.callback(shutil.rmtree, folder)
        try:
            _rehearse(options, folder)
        except CheckFailed as error:
            at_end.pop_all()
            raise RunFailed(f"{error} - see {folder}/*/node*.log") from error


def _read_arguments(arguments: Sequence[str]) -> Namespace:
    parser = Parser("python -m distTest.rehearse", description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--procs-per-node", type=int, default=int(DEFAULTS["GPUS_PER_NODE"]))
    parser.add_argument("--config", type=Path, default=REPOSITORY / "config.yaml")
    parser.add_argument("--loopback", action="store_true", help="no network namespaces")
    parser.add_argument("assignments", nargs="*", metavar="section.key=value")
    options = parser.parse_args(arguments)
    if not 2 <= options.nodes <= 200 or options.procs_per_node < 1:
        parser.error("--nodes is from 2 to 200, and --procs-per-node at least 1")
    options.ranks = options.nodes * options.procs_per_node
    return options


def _rehearse(options: Namespace, folder: Path) -> None:
    print(f"Rehearsing {options.nodes} nodes of {options.procs_per_node} processes in {folder}")
    arguments = _write_inputs(options, folder)
    run_dir = folder / "run"
    with _node_commands(options, folder, arguments) as commands:
        with launched(commands, folder / "first") as nodes:
            _check_rendezvous(nodes, options)
            checkpoint = _check_lost_node(nodes, options.nodes - 1)
        _check_sharding(run_dir / "checkpoints" / checkpoint, options.ranks)
        before = _read_steps(run_dir)
        print("\nThe same commands again\n", flush=True)
        with launched(commands, folder / "again") as nodes:
            resumed_step = _check_resume(nodes, checkpoint)
    _check_repeated_steps(before, _read_steps(run_dir), resumed_step)
    print(
        "\nRehearsed: every check passed. It cannot show GPUs, NCCL, the network between your "
        "nodes, or whether the real model fits."
    )


def _write_inputs(options: Namespace, folder: Path) -> list[str]:
    """Write model and data; return the arguments of the launch scripts after `--config`."""
    # PyTorch: seconds
    from distTest.workloads.small_models import ROW_TOKENS, make_model, write_rows

    config = load_config(options.config, options.assignments, {})
    print(f"Model: {make_model(config.model.path, options.ranks, folder / 'model')}")
    rows = Layout.of(config, options.ranks).rows_per_step
    # Templates of some models refuse a system message.
    write_rows(folder / "train.jsonl", rows * STEPS, has_system=False)
    write_rows(folder / "eval.jsonl", options.ranks, seed=1, has_system=False)
    replaced = {
        "run.dir": folder / "run",
        "run.resume": "auto",
        "model.path": folder / "model",
        "model.init": "random",
        "data.train": folder / "train.jsonl",
        "data.eval": folder / "eval.jsonl",
        "data.columns": "null",
        "data.max_length": ROW_TOKENS,
        "train.max_steps": STEPS,
        "checkpoint.every_steps": STEPS_BETWEEN_SAVES,
        "logging.every_steps": 1,
        "distributed.backend": "gloo",
    }
    return [*options.assignments, *(f"{key}={value}" for key, value in replaced.items())]


@contextlib.contextmanager
def _node_commands(
    options: Namespace, folder: Path, arguments: list[str]
) -> Iterator[list[list[str]]]:
    (folder / "tmp").mkdir()
    with contextlib.ExitStack() as stack:
        if obstacle := "--loopback" if options.loopback else namespaces.obstacle():
            address, port, interface = "127.0.0.1", free_port(), "lo"
            prefixes: list[list[str]] = [[]] * options.nodes
            print(f"All nodes are this host, over loopback: {obstacle}")
        else:
            address, port = DEFAULTS["MASTER_ADDR"], int(DEFAULTS["MASTER_PORT"])
            interface = DEFAULTS["NCCL_SOCKET_IFNAME"]
            addresses = [str(ip_address(address) + node) for node in range(options.nodes)]
            nodes = stack.enter_context(namespaces.joined_nodes(addresses, interface))
            prefixes = [node.prefix for node in nodes]
            print(f"Each node is a network namespace, with {interface}: {', '.join(addresses)}")
        env = [
            "env",
            f"MASTER_ADDR={address}",
            f"MASTER_PORT={port}",
            f"NNODES={options.nodes}",
            f"GPUS_PER_NODE={options.procs_per_node}",
            f"NCCL_SOCKET_IFNAME={interface}",
            f"GLOO_SOCKET_IFNAME={interface}",
            "CUDA_VISIBLE_DEVICES=",
            # The files that a killed node leaves are deleted with this folder.
            f"SHARDTUNE_CACHE={folder / 'cache'}",
            f"TMPDIR={folder / 'tmp'}",
        ]
        arguments = ["--config", str(options.config.resolve()), *arguments]
        scripts = [REPOSITORY / f"launch_node{min(node, 1)}.sh" for node in range(options.nodes)]
        print(f"Each node runs: {shlex.join([*env, str(scripts[0]), *arguments])}\n", flush=True)
        yield [
            [*prefix, *env, f"NODE_RANK={node}", str(script), *arguments]
            for node, (prefix, script) in enumerate(zip(prefixes, scripts, strict=True))
        ]


def _check_rendezvous(nodes: NodeProcesses, options: Namespace) -> None:
    sizes = rf"  World Size: {options.ranks}\n  Number of Nodes: {options.nodes}\n"
    block = rf"^Training Configuration:\n  Hostname: .+\n{sizes}(?:  .+\n)*  Master: (.+)\n"
    for node in range(options.nodes):
        what = f"Training Configuration: on node {node}"
        (master,) = nodes.read_until(what, partial(nodes.find, node, block))
    _check("rendezvous", True, f"{options.nodes} nodes of {options.ranks} ranks met at {master}")


def _check_lost_node(nodes: NodeProcesses, last: int) -> str:
    """Kill the last node after a save; check that all others end with 1; return the save's name."""
    saved = nodes.read_until("a save", partial(nodes.find, 0, r"^Saved (checkpoint_\d+)$"))[-1]
    next_step = rf"^Step {STEPS_BETWEEN_SAVES + 1}/"
    nodes.read_until("the step behind it", partial(nodes.find, 0, next_step))
    kill(last)
    killed = time.monotonic()
    print(f"\nKilled every process of node {last} (-9)\n", flush=True)
    codes = nodes.read_until("the end of all processes", nodes.exit_codes)[:last]
    after_s = time.monotonic() - killed
    lines = [output.splitlines()[-1] for output in nodes.outputs[:last]]
    is_right = set(codes) == {1} and all(line.startswith("ERROR: ") for line in lines)
    causes = {line.partition(" - ")[0] for line in lines}
    _check("a node lost", is_right, f"{after_s:.0f} s later others ended with {codes}, {causes}")
    return saved


def _check_sharding(checkpoint: Path, ranks: int) -> None:
    sizes = [file.stat().st_size for file in checkpoint.glob("rank_*.safetensors")]
    largest = max(sizes) / sum(sizes)
    files = f"{checkpoint.name} has {len(sizes)} files, the largest has {largest:.1%} of the bytes"
    _check("sharding", len(sizes) == ranks and largest <= 2 / ranks, files)


def _check_resume(nodes: NodeProcesses, saved: str) -> int:
    """Return the step from which the run goes on to its end."""
    codes = nodes.read_until("the end of the run", nodes.exit_codes)
    resumed = "".join(nodes.find(0, r"^Resumed from (checkpoint_\d+)$"))
    ends = f"resumed from {resumed or 'nothing'}, ended with {codes}"
    _check("resume", resumed >= saved and not any(codes), ends)
    return int(resumed.rpartition("_")[2])


def _read_steps(run_dir: Path) -> list[list[float]]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [entry for entry in map(json.loads, lines) if entry["kind"] == "step"]
    return [[step[key] for key in ("step", "loss", "grad_norm")] for step in steps]


def _check_repeated_steps(
    before: list[list[float]], after: list[list[float]], resumed_step: int
) -> None:
    numbers = [step for step, _, _ in after]
    _check("steps", numbers == list(range(1, STEPS + 1)), f"metrics.jsonl has {numbers}")
    old, new = before[resumed_step:], after[resumed_step : len(before)]
    values = f"[step, loss, gradient norm] were {old} before the kill, and are {new}"
    _check("repeated steps", bool(old) and old == new, values)


def _check(name: str, has_passed: bool, what: str) -> None:
    if not has_passed:
        raise CheckFailed(f"{name}: {what}")
    print(f"PASSED {name}: {what}", flush=True)


if __name__ == "__main__":
    sys.exit(code_of(partial(main, sys.argv[1:])))
