"""Rehearse a run on this machine: the launch scripts as several nodes, one of which is killed.

The nodes have CPU processes and a random tiny model of the configured architecture. The same
commands resume then.

python -m distTest.rehearse [--nodes 2] [--procs-per-node 8] [--config FILE] [--loopback]
    [-- section.key=value ...]
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distTest.rehearse import namespaces
from distTest.rehearse.node_processes import CheckFailed, NodeCommand, NodeProcesses
from distTest.rehearse.tiny_model import ROW_TOKENS, make_model, write_chats
from shardtune.__main__ import run as run_tool
from shardtune.cluster.environment import DEFAULTS, REPOSITORY
from shardtune.cluster.network import free_port
from shardtune.config import Config
from shardtune.config_io import Parser, load_config, to_dict
from shardtune.distributed.signals import end_on_signal
from shardtune.errors import Aborted, UserError
from shardtune.log import quiet_libraries

PROCESSES = int(DEFAULTS["GPUS_PER_NODE"])
_VARIABLES = [
    *("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "GPUS_PER_NODE"),
    *("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "JOIN_TIMEOUT"),
]

STEPS, STEPS_BETWEEN_SAVES = 13, 5
# A node is killed so many steps behind a save at most, so that its end comes before the next one.
_MOST_STEPS_BEHIND = 2
_END_TIMEOUT_S = 60
_TIMEOUT_S = 600  # a few seconds suffice on an idle machine


@dataclass(frozen=True)
class Plan:
    """`arguments` are those of the launch scripts, and `config` is read from them."""

    config: Config
    arguments: list[str]
    master: str  # address:port
    nodes: int
    processes: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes

    @property
    def has_baseline(self) -> bool:
        return self.config.eval.baseline and (
            self.config.data.eval is not None or self.config.data.eval_fraction > 0
        )


def rehearse(arguments: Sequence[str], folder: Path) -> None:
    """Rehearse with every file in `folder`.

    Raises:
        CheckFailed: the first check that failed.
        UserError: the arguments are wrong.
    """
    started = time.monotonic()
    options, assignments = _read_arguments(arguments)
    end_on_signal("with all that it had started - run it again", code=1)
    quiet_libraries(is_main=False)
    print(
        f"Rehearsing {options.nodes} nodes x {options.procs_per_node} processes over CPU, "
        f"in {folder}"
    )
    with node_commands(options, folder) as (commands, master):
        changed = _prepare(folder, options, assignments)
        plan = Plan(
            load_config(options.config, changed, {}),
            ["--config", str(options.config), *changed],
            master,
            options.nodes,
            options.procs_per_node,
        )
        print(f"Each node runs: ./launch_node<0 or 1>.sh {' '.join(plan.arguments)}\n", flush=True)
        saved, steps = _run_until_a_node_dies(plan, commands, folder)
        _run_to_the_end(plan, commands, folder, saved, steps)
    print(
        f"\nRehearsed in {time.monotonic() - started:.0f} s: every check passed. It cannot show "
        "GPUs, NCCL, the network between your nodes, or whether the real model fits."
    )


def _read_arguments(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The options, and the assignments behind `--`."""
    cut = list(arguments).index("--") if "--" in arguments else len(arguments)
    parser = Parser(
        prog="python -m distTest.rehearse", description=str(__doc__).partition("\n\n")[0]
    )
    parser.add_argument("--nodes", type=int, default=2, help="one of which is killed (default: 2)")
    parser.add_argument(
        "--procs-per-node", type=int, default=PROCESSES, help=f"(default: {PROCESSES})"
    )
    parser.add_argument(
        "--config", type=Path, default=REPOSITORY / "config.yaml", help="(default: config.yaml)"
    )
    parser.add_argument(
        "--loopback", action="store_true", help="no network namespaces, although they can be made"
    )
    options = parser.parse_args(arguments[:cut])
    if not 2 <= options.nodes <= 200 or options.procs_per_node < 1:
        parser.error(
            f"--nodes {options.nodes} --procs-per-node {options.procs_per_node}: "
            "from 2 to 200 and at least 1"
        )
    options.config = options.config.resolve()
    return options, list(arguments[cut + 1 :])


@contextlib.contextmanager
def node_commands(options: Any, folder: Path) -> Iterator[tuple[list[NodeCommand], str]]:
    """The command of each node and node 0's address: in network namespaces, else on loopback."""
    common = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    if unused := [name for name in _VARIABLES if name in os.environ]:
        print(f"Not used, the rehearsal has its own: {', '.join(unused)}")
    (folder / "tmp").mkdir()
    # The files that a killed node leaves go with the folder.
    common |= {
        "CUDA_VISIBLE_DEVICES": "",
        "SHARDTUNE_CACHE": str(folder / "cache"),
        "TMPDIR": str(folder / "tmp"),
    }
    if options.procs_per_node != PROCESSES:
        common["GPUS_PER_NODE"] = str(options.procs_per_node)
    if options.nodes != int(DEFAULTS["NNODES"]):
        common["NNODES"] = str(options.nodes)
    ranks = [{} if node < 2 else {"NODE_RANK": str(node)} for node in range(options.nodes)]
    scripts = [REPOSITORY / f"launch_node{min(node, 1)}.sh" for node in range(options.nodes)]

    no_namespaces = "--loopback" if options.loopback else namespaces.obstacle()
    interface = DEFAULTS["NCCL_SOCKET_IFNAME"]
    with contextlib.ExitStack() as stack:
        if not no_namespaces:
            network, _, first = DEFAULTS["MASTER_ADDR"].rpartition(".")
            addresses = [f"{network}.{int(first) + node}" for node in range(options.nodes)]
            try:
                nodes = stack.enter_context(namespaces.joined_nodes(addresses, interface))
            except subprocess.CalledProcessError as error:
                no_namespaces = f"this kernel makes no network namespaces ({error.stderr.strip()})"
        if not no_namespaces:
            print(
                "Each node is a network namespace, which no packet leaves, with "
                f"{interface}: {', '.join(addresses)}"
            )
            master = f"{DEFAULTS['MASTER_ADDR']}:{DEFAULTS['MASTER_PORT']}"
            prefixes = [node.prefix for node in nodes]
        else:
            master = f"127.0.0.1:{free_port()}"
            address, _, port = master.partition(":")
            here = {"MASTER_ADDR": address, "MASTER_PORT": port, "NCCL_SOCKET_IFNAME": "lo"}
            print(f"All nodes are this host, over loopback: {no_namespaces}")
            print(f"Set for them: {' '.join(f'{name}={value}' for name, value in here.items())}")
            common |= here
            prefixes = [[] for _ in range(options.nodes)]
        yield (
            [
                NodeCommand(prefix, script, common | rank)
                for prefix, script, rank in zip(prefixes, scripts, ranks, strict=True)
            ],
            master,
        )


def _prepare(folder: Path, options: Any, assignments: list[str]) -> list[str]:
    """Write model and data; return the assignments, followed by those of the rehearsal."""
    config = load_config(options.config, assignments, {})
    ranks = options.nodes * options.procs_per_node
    model = make_model(config.model.path, ranks, folder / "model")
    print(f"Model: {model}")
    rows = config.train.micro_batch_size * config.train.gradient_accumulation_steps * ranks * STEPS
    left = 1 - config.data.eval_fraction if config.data.eval is None else 1.0
    write_chats(folder / "train.jsonl", math.ceil(rows / left) + (left < 1), seed=0)
    write_chats(folder / "eval.jsonl", ranks, seed=1)
    ours: dict[str, Any] = {
        "run.dir": str(folder / "run"),
        "run.resume": "auto",
        "model.path": str(folder / "model"),
        "model.init": "random",
        "model.compute_dtype": "float32",
        "data.train": str(folder / "train.jsonl"),
        "data.max_length": ROW_TOKENS,
        "train.max_steps": STEPS,
        "checkpoint.every_steps": STEPS_BETWEEN_SAVES,
        "logging.every_steps": 1,
    }
    if config.data.eval is not None:
        ours["data.eval"] = str(folder / "eval.jsonl")
    if config.distributed.backend == "nccl":
        ours["distributed.backend"] = "gloo"
    sections = to_dict(config)
    before = {key: sections[key.partition(".")[0]][key.partition(".")[2]] for key in ours}
    ours = {key: value for key, value in ours.items() if value != before[key]}
    print("Replaced for the rehearsal, all other values are the configuration's:")
    for key, value in ours.items():
        print(f"  {key}={value} (was {json.dumps(before[key])})")
    return [a for a in assignments if a.partition("=")[0] not in ours] + [
        f"{k}={v}" for k, v in ours.items()
    ]


def _run_until_a_node_dies(
    plan: Plan, commands: list[NodeCommand], folder: Path
) -> tuple[str, list[dict[str, Any]]]:
    """Kill the last node behind a save; the newest checkpoint, and every step before the kill."""
    last = plan.nodes - 1
    with NodeProcesses(commands, plan.arguments, folder) as processes:
        _check_rendezvous(plan, processes)
        if plan.has_baseline:
            baseline = r"^Baseline Perplexity: (\S+) \| Loss: \S+ \| Tokens: \d+"
            processes.read_until(
                "Baseline Perplexity", lambda: processes.find(0, baseline), _TIMEOUT_S
            )
            _passed(
                "baseline", f"perplexity {processes.find(0, baseline)[-1]} before the first update"
            )
        processes.read_until(
            "a step behind Saved checkpoint_...",
            lambda: _is_right_behind_a_save(processes),
            _TIMEOUT_S,
        )
        processes.kill(last)
        killed = time.monotonic()
        print(f"\nKilled every process of node {last} (-9)\n", flush=True)
        processes.read_until(
            "the end of all processes", lambda: processes.have_all_ended, _END_TIMEOUT_S
        )
        ended_after_s = time.monotonic() - killed
        steps = _check_steps(plan)
        saved = _check_checkpoint(plan, processes)
        for node in range(last):
            line = processes.lines[node][-1]
            if processes.exit_codes[node] != 1 or not line.startswith("ERROR: "):
                raise CheckFailed(
                    f"node {node} ended with code {processes.exit_codes[node]} and '{line}', "
                    "not with 1 and ERROR"
                )
        others = "node 0" if last == 1 else f"nodes 0 to {last - 1}"
        _passed(
            "a node lost",
            f"{others} ended {ended_after_s:.0f} s later, with code 1 and an ERROR line",
        )
    return saved, steps


def _is_right_behind_a_save(processes: NodeProcesses) -> bool:
    """Steps have been made since the last save, and the next save is some steps away."""
    saves, steps = processes.find(0, r"^Saved checkpoint_(\d+)"), processes.find(0, r"^Step (\d+)/")
    return bool(saves) and 1 <= int(steps[-1]) - int(saves[-1]) <= _MOST_STEPS_BEHIND


def _check_rendezvous(plan: Plan, processes: NodeProcesses) -> None:
    sizes = rf"  World Size: {plan.ranks}\n  Number of Nodes: {plan.nodes}\n"
    block = rf"^Training Configuration:\n  Hostname: .+\n{sizes}(?:  .+\n)+\n"
    nodes = range(plan.nodes)
    processes.read_until(
        "Training Configuration: on every node",
        lambda: all(processes.find(node, block) for node in nodes),
        _TIMEOUT_S,
    )
    for node in nodes:
        banner = f"Launching {'WORKER' if node else 'MASTER'} NODE (Node {node})"
        if banner not in processes.lines[node]:
            raise CheckFailed(f"node {node} did not print '{banner}'")
    _passed(
        "rendezvous",
        f"{plan.nodes} nodes met at {plan.master} and are one world of {plan.ranks} ranks",
    )


def _check_steps(plan: Plan) -> list[dict[str, Any]]:
    """Check the steps of metrics.jsonl, and return them."""
    lines = (Path(plan.config.run.dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [entry for entry in map(json.loads, lines) if entry["kind"] == "step"]
    for step in steps:
        if not all(
            isinstance(step[key], float) and math.isfinite(step[key])
            for key in ("loss", "grad_norm")
        ):
            raise CheckFailed(
                f"step {step['step']} has loss {step['loss']} and gradient norm {step['grad_norm']}"
            )
    if [step["step"] for step in steps] != list(range(1, len(steps) + 1)):
        raise CheckFailed(
            f"metrics.jsonl has the steps {[step['step'] for step in steps]}, not each once"
        )
    _passed("steps", f"{len(steps)} of {STEPS}, with finite losses and gradient norms")
    return steps


def _check_checkpoint(plan: Plan, processes: NodeProcesses) -> str:
    """Check the newest checkpoint, and return its name."""
    name = processes.find(0, r"^Saved (checkpoint_\d+)")[-1]
    checkpoint = Path(plan.config.run.dir) / "checkpoints" / name
    if run_tool(["verify", str(checkpoint)]) != 0:
        raise CheckFailed(f"{checkpoint} is not intact")
    _passed("checkpoint", f"`python -m shardtune verify` finds {name} intact")
    sizes = [file.stat().st_size for file in checkpoint.glob("rank_*.safetensors")]
    largest = max(sizes) / sum(sizes)
    if len(sizes) != plan.ranks or largest > 2 / plan.ranks:
        raise CheckFailed(
            f"{name} has {len(sizes)} files for {plan.ranks} ranks, and {largest:.0%} of the bytes "
            "in one"
        )
    _passed(
        "sharding", f"{plan.ranks} ranks saved a part each, the largest {largest:.1%} of the whole"
    )
    return name


def _run_to_the_end(
    plan: Plan,
    commands: list[NodeCommand],
    folder: Path,
    saved: str,
    before: list[dict[str, Any]],
) -> None:
    print("\nThe same commands again\n", flush=True)
    with NodeProcesses(commands, plan.arguments, folder) as processes:
        processes.read_until("the end of the run", lambda: processes.have_all_ended, _TIMEOUT_S)
        if any(processes.exit_codes.values()):
            raise CheckFailed(f"the second launch did not finish: {processes.outcome}")
        resumed = processes.find(0, r"^Resumed from (checkpoint_\d+)$")
        if not resumed or resumed[0] < saved:
            raise CheckFailed(f"the second launch did not resume from {saved} or a newer one")
        _passed("resume", f"Resumed from {resumed[0]}, finished with code 0 on every node")
    after = _check_steps(plan)
    first = int(resumed[0].rpartition("_")[2])
    if len(after) != STEPS:
        raise CheckFailed(f"the run finished after {len(after)} steps, not {STEPS}")
    for old, new in zip(before, after, strict=False):
        for key in ("loss", "grad_norm"):
            if old[key] != new[key]:
                raise CheckFailed(
                    f"{key} of step {old['step']} was {old[key]} before the kill and is {new[key]} "
                    "now"
                )
    if len(before) == first:
        raise CheckFailed(
            f"no step was repeated: {resumed[0]} was saved before the kill reached the run; "
            "rehearse again"
        )
    _passed(
        "repeated steps",
        f"{len(before) - first} of them, with the same losses to the last bit as before the kill",
    )
    if plan.config.export.final:
        _check_model(Path(plan.config.run.dir) / "model")


def _check_model(path: Path) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
    )
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer("rank node")["input_ids"]])).logits
    if not torch.isfinite(logits).all():
        raise CheckFailed(f"the model in {path} gives values that are not finite")
    _passed(
        "final model",
        f"opens with from_pretrained, {sum(p.numel() for p in model.parameters())} parameters",
    )


def _passed(check: str, what: str) -> None:
    print(f"PASSED {check}: {what}", flush=True)


def run(arguments: Sequence[str]) -> int:
    """Rehearse, print an `ERROR:` line for each problem, and return the exit code.

    The logs are kept if a check failed.
    """
    folder = Path(tempfile.mkdtemp(prefix="shardtune-rehearsal-"))
    code, lines, is_kept = 0, [], False
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        rehearse(arguments, folder)
    except UserError as refused:
        code, lines = 2, refused.problems
    except Aborted as ended:
        code, lines = ended.code, [str(ended)]
    except Exception as error:
        if not isinstance(error, CheckFailed):
            traceback.print_exc()
        what = str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
        logs = " ".join(map(str, sorted(folder.glob("node*.log"))))
        code, lines, is_kept = 1, [f"{what} - see {logs or 'above'}"], True
    finally:
        if not is_kept:
            shutil.rmtree(folder)
    sys.stdout.flush()
    for line in lines:
        print(f"ERROR: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
