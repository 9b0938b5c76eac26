"""Rehearse a run on this one machine: the launch scripts as they are, as several nodes of several CPU processes, with
a tiny random model of the configured architecture; one node is killed, and the same commands resume.

python -m distTest.rehearse [--nodes 2] [--procs-per-node 8] [--config FILE] [--loopback] [-- section.key=value ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: then modules are looked for beside it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import contextlib
import io
import json
import math
import os
import shutil
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distTest.rehearse import namespaces
from distTest.rehearse.node_processes import Failed, Place, Terminals
from distTest.rehearse.tiny_model import ROW_TOKENS, make_model, write_chats
from shardtune.__main__ import run as run_tool
from shardtune.config import Config
from shardtune.config_io import Parser, load_config, to_dict
from shardtune.distributed.signals import end_on_signal
from shardtune.errors import Aborted, UserError
from shardtune.log import quiet_libraries

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# The launch scripts' own defaults, which hold where nothing is set.
MASTER, INTERFACE, PORT, PROCESSES = "10.11.7.50", "enp26s0np0", 29600, 8
_SETTINGS = [
    *("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "GPUS_PER_NODE"),
    *("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "JOIN_TIMEOUT"),
]

STEPS, STEPS_BETWEEN_SAVES = 7, 3
_NODES_MAY_END_WITHIN_S = 60
_PATIENCE_S = 600  # for what a few seconds suffice on a machine with nothing else to do


@dataclass(frozen=True)
class Plan:
    """`arguments` are the launch scripts', `config` what they read of these."""

    config: Config
    arguments: list[str]
    master: str
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
    """All of it, with every file in `folder`. Raises Failed at the first check that does, Refused for bad arguments."""
    started = time.monotonic()
    options, assignments = _read_arguments(arguments)
    end_on_signal("with all that it had started - run it again", code=1)
    quiet_libraries(is_main=False)
    print(
        f"Rehearsing {options.nodes} nodes x {options.procs_per_node} processes over CPU, in {folder}"
    )
    with shuffle_groups(options, folder) as (places, master):
        changed = _prepare(folder, options, assignments)
        plan = Plan(
            load_config(options.config, changed, {}),
            ["--config", str(options.config), *changed],
            master,
            options.nodes,
            options.procs_per_node,
        )
        print(f"Each node runs: ./launch_node<0 or 1>.sh {' '.join(plan.arguments)}\n", flush=True)
        saved, steps = _run_until_a_node_dies(plan, places, folder)
        _run_to_the_end(plan, places, folder, saved, steps)
    print(
        f"\nRehearsed in {time.monotonic() - started:.0f} s: every check passed. What this cannot show: GPUs and NCCL, "
        "the network between your nodes, and whether the real model fits."
    )


def _read_arguments(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The options, and what stands behind `--`."""
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
            f"--nodes {options.nodes} --procs-per-node {options.procs_per_node}: from 2 to 200 and at least 1"
        )
    options.config = options.config.resolve()
    return options, list(arguments[cut + 1 :])


@contextlib.contextmanager
def shuffle_groups(options: Any, folder: Path) -> Iterator[tuple[list[Place], str]]:
    """Where each node runs, and the master's address: namespaces if they can be made, else loopback; said which."""
    common = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    if unused := [name for name in _SETTINGS if name in os.environ]:
        print(f"Not used, the rehearsal has its own: {', '.join(unused)}")
    (folder / "tmp").mkdir()
    # What a killed node leaves behind goes with the folder.
    common |= {
        "CUDA_VISIBLE_DEVICES": "",
        "SHARDTUNE_CACHE": str(folder / "cache"),
        "TMPDIR": str(folder / "tmp"),
    }
    common |= (
        {"GPUS_PER_NODE": str(options.procs_per_node)}
        if options.procs_per_node != PROCESSES
        else {}
    )
    common |= {"NNODES": str(options.nodes)} if options.nodes != 2 else {}
    own = [{} if node < 2 else {"NODE_RANK": str(node)} for node in range(options.nodes)]
    scripts = [REPOSITORY / f"launch_node{min(node, 1)}.sh" for node in range(options.nodes)]

    why_not = "--loopback" if options.loopback else namespaces.why_not()
    with contextlib.ExitStack() as stack:
        if not why_not:
            network, _, first = MASTER.rpartition(".")
            addresses = [f"{network}.{int(first) + node}" for node in range(options.nodes)]
            try:
                nodes = stack.enter_context(namespaces.joined_nodes(addresses, INTERFACE))
            except subprocess.CalledProcessError as error:
                why_not = f"this kernel makes no network namespaces ({error.stderr.strip()})"
        if not why_not:
            print(
                f"Each node is a network namespace, which no packet leaves, with {INTERFACE}: {', '.join(addresses)}"
            )
            master = f"{MASTER}:{PORT}"
            places = [
                Place(n.prefix, s, common | o) for n, s, o in zip(nodes, scripts, own, strict=True)
            ]
        else:
            port = _free_port()
            here = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "NCCL_SOCKET_IFNAME": "lo",
            }
            print(f"All nodes are this host, over loopback: {why_not}")
            print(f"Set for them: {' '.join(f'{name}={value}' for name, value in here.items())}")
            master = f"127.0.0.1:{port}"
            places = [Place([], s, common | here | o) for s, o in zip(scripts, own, strict=True)]
        yield places, master


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _prepare(folder: Path, options: Any, assignments: list[str]) -> list[str]:
    """Write model and data; the assignments, with all that the rehearsal replaces among them."""
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
    plan: Plan, places: list[Place], folder: Path
) -> tuple[str, list[dict[str, Any]]]:
    """The newest checkpoint that the run said to have saved, and every step that it had made by then."""
    last = plan.nodes - 1
    with Terminals(places, plan.arguments, folder) as terminals:
        _check_rendezvous(plan, terminals)
        if plan.has_baseline:
            baseline = r"^Baseline Perplexity: (\S+) \| Loss: \S+ \| Tokens: \d+"
            terminals.read_until(
                "Baseline Perplexity", lambda: terminals.find(0, baseline), _PATIENCE_S
            )
            _passed(
                "baseline", f"perplexity {terminals.find(0, baseline)[-1]} before the first update"
            )
        terminals.read_until(
            "a step behind Saved checkpoint_...", lambda: _is_behind_a_save(terminals), _PATIENCE_S
        )
        terminals.kill(last)
        killed = time.monotonic()
        print(f"\nKilled every process of node {last} (-9)\n", flush=True)
        terminals.read_until(
            "the end of all processes", lambda: terminals.all_ended, _NODES_MAY_END_WITHIN_S
        )
        ended_after_s = time.monotonic() - killed
        steps = _check_steps(plan)
        saved = _check_checkpoint(plan, terminals)
        for node in range(last):
            line = terminals.said[node][-1]
            if terminals.codes[node] != 1 or not line.startswith("ERROR: "):
                raise Failed(
                    f"node {node} ended with code {terminals.codes[node]} and '{line}', not with 1 and ERROR"
                )
        others = "node 0" if last == 1 else f"nodes 0 to {last - 1}"
        _passed(
            "a node lost",
            f"{others} ended {ended_after_s:.0f} s later, with code 1 and an ERROR line",
        )
    return saved, steps


def _is_behind_a_save(terminals: Terminals) -> bool:
    saves, steps = terminals.find(0, r"^Saved checkpoint_(\d+)"), terminals.find(0, r"^Step (\d+)/")
    return bool(saves) and int(steps[-1]) > int(saves[-1])


def _check_rendezvous(plan: Plan, terminals: Terminals) -> None:
    sizes = rf"  World Size: {plan.ranks}\n  Number of Nodes: {plan.nodes}\n"
    block = rf"^Training Configuration:\n  Hostname: .+\n{sizes}(?:  .+\n)+\n"
    nodes = range(plan.nodes)
    terminals.read_until(
        "Training Configuration: on every node",
        lambda: all(terminals.find(node, block) for node in nodes),
        _PATIENCE_S,
    )
    for node in nodes:
        banner = f"Launching {'WORKER' if node else 'MASTER'} NODE (Node {node})"
        if banner not in terminals.said[node]:
            raise Failed(f"node {node} did not print '{banner}'")
    _passed(
        "rendezvous",
        f"{plan.nodes} nodes met at {plan.master} and are one world of {plan.ranks} ranks",
    )


def _check_steps(plan: Plan) -> list[dict[str, Any]]:
    """The steps that metrics.jsonl has."""
    lines = (Path(plan.config.run.dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [entry for entry in map(json.loads, lines) if entry["kind"] == "step"]
    for step in steps:
        if not all(
            isinstance(step[key], float) and math.isfinite(step[key])
            for key in ("loss", "grad_norm")
        ):
            raise Failed(
                f"step {step['step']} has loss {step['loss']} and gradient norm {step['grad_norm']}"
            )
    if [step["step"] for step in steps] != list(range(1, len(steps) + 1)):
        raise Failed(
            f"metrics.jsonl has the steps {[step['step'] for step in steps]}, not each once"
        )
    _passed("steps", f"{len(steps)} of {STEPS}, with finite losses and gradient norms")
    return steps


def _check_checkpoint(plan: Plan, terminals: Terminals) -> str:
    """Its name."""
    name = terminals.find(0, r"^Saved (checkpoint_\d+)")[-1]
    checkpoint = Path(plan.config.run.dir) / "checkpoints" / name
    if run_tool(["verify", str(checkpoint)]) != 0:
        raise Failed(f"{checkpoint} is not intact")
    _passed("checkpoint", f"`python -m shardtune verify` finds {name} intact")
    sizes = [file.stat().st_size for file in checkpoint.glob("rank_*.safetensors")]
    largest = max(sizes) / sum(sizes)
    if len(sizes) != plan.ranks or largest > 2 / plan.ranks:
        raise Failed(
            f"{name} has {len(sizes)} files for {plan.ranks} ranks, and {largest:.0%} of the bytes in one"
        )
    _passed(
        "sharding", f"{plan.ranks} ranks saved a part each, the largest {largest:.1%} of the whole"
    )
    return name


def _run_to_the_end(
    plan: Plan, places: list[Place], folder: Path, saved: str, before: list[dict[str, Any]]
) -> None:
    print("\nThe same commands again\n", flush=True)
    with Terminals(places, plan.arguments, folder) as terminals:
        terminals.read_until("the end of the run", lambda: terminals.all_ended, _PATIENCE_S)
        if any(terminals.codes.values()):
            raise Failed(f"the second launch did not finish: {terminals.outcome}")
        resumed = terminals.find(0, r"^Resumed from (checkpoint_\d+)$")
        if not resumed or resumed[0] < saved:
            raise Failed(f"the second launch did not resume from {saved} or a newer one")
        _passed("resume", f"Resumed from {resumed[0]}, finished with code 0 on every node")
    after = _check_steps(plan)
    first = int(resumed[0].rpartition("_")[2])
    if len(after) != STEPS:
        raise Failed(f"the run finished after {len(after)} steps, not {STEPS}")
    for one, other in zip(before, after, strict=False):
        for key in ("loss", "grad_norm"):
            if one[key] != other[key]:
                raise Failed(
                    f"{key} of step {one['step']} was {one[key]} before the kill and is {other[key]} now"
                )
    if len(before) == first:
        raise Failed(f"no step was repeated, the kill came right behind the save of {resumed[0]}")
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
        raise Failed(f"the model in {path} gives values that are not finite")
    _passed(
        "final model",
        f"opens with from_pretrained, {sum(p.numel() for p in model.parameters())} parameters",
    )


def _passed(check: str, what: str) -> None:
    print(f"PASSED {check}: {what}", flush=True)


def run(arguments: Sequence[str]) -> int:
    """Rehearse; the exit code, after an `ERROR:` line unless it is 0. The logs are kept if a check failed."""
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
        if not isinstance(error, Failed):
            traceback.print_exc()
        what = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
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
