"""shardtune against what people would use instead, on this machine's CPU; writes
benchmarks/RESULTS.md and its plot.

python -m benchmarks.bench --model DIR --peers PYTHON [--short] [--sections NAME ...]

All sides train the same weights on the same chats. All of the chats are one optimizer step, so
every side has the same global batch, however it orders and packs. At every step its loss must
equal the reference's (HF Trainer's, or the first peer's without it) before any of its figures
counts. In each round the sides take turns, in another order each time. Each runs in its own process
on one pinned core with one thread. Its first step also sets things up and is not counted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.alone import loss_memory, many_records, scaling, spread_experts, traffic
from benchmarks.measure import (
    FAILED,
    PROFILE_LABEL,
    REPOSITORY,
    TOLERANCE,
    Side,
    Unequal,
    commit,
    gated,
    in_turns,
    run_ours,
    run_peer,
    run_pinned,
    settings,
)
from benchmarks.report import NAMES, report
from distTest.workloads.chats import MIXES, write_chats
from shardtune.model.flops import ModelFlops, count_flops, measure_matmul_rate

PEERS: dict[str, dict[str, Any]] = {
    "trl_packed": {},
    "trl_padded": {"batch-size": 4},
    "trl_single": {},
    "hf_trainer": {},
}
REFERENCE = "hf_trainer"
SECTIONS = ("traffic", "one", "profile", "two", "head", "scaling", "records", "experts")


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    os.environ["SHARDTUNE_CACHE"] = str(
        options.work / "cache"
    )  # without the tokens of an earlier run
    options.results.parent.mkdir(parents=True, exist_ok=True)
    results_file, plot = (options.results.with_suffix(suffix) for suffix in (".json", ".png"))
    results = json.loads(results_file.read_text(encoding="utf-8")) if results_file.exists() else {}
    chats = write_chats(options.work / "chats.jsonl", options.tokens, options.max_length)
    measured_with = machine(options)
    for name, measure in parts(options).items():
        print(f"{name}:", flush=True)
        failures, figures = len(FAILED), {}
        try:
            figures = measure(options, chats)
        except Unequal as difference:
            FAILED.append(f"{name}: {difference}")
        results[name] = {
            "measured_with": measured_with,
            "figures": figures,
            "failed": FAILED[failures:],
        }
        results_file.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if any(
        part["figures"] for name, part in results.items() if name.split()[0] in ("one", "scaling")
    ):
        plot.unlink(missing_ok=True)
        command = [options.peers, "-m", "benchmarks.plot", results_file, plot]
        run_pinned(command, None, options.work / "plot.log", 300)
    options.results.write_text(
        report(results, plot.name if plot.exists() else None), encoding="utf-8"
    )
    print(f"Written: {options.results}")
    if FAILED:
        sys.exit(f"ERROR: {'; '.join(FAILED)} - see the logs in {options.work}")


def parts(
    options: argparse.Namespace,
) -> dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]]:
    """Return the measurements that the options ask for, by their names in the results; other
    results stay as they are.
    """
    parts_to_measure: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {}
    sections = {
        "traffic": traffic,
        "two": two_ranks,
        "head": loss_memory,
        "scaling": scaling,
        "records": many_records,
        "experts": spread_experts,
    }
    for name in options.sections:
        if name in sections:
            parts_to_measure[name] = sections[name]
        elif name == "profile":
            for dtype in options.dtypes:
                parts_to_measure[f"{name} {dtype}"] = partial(profile, dtype=dtype)
        else:
            for dtype, mix in product(options.dtypes, options.mixes):
                measure = partial(one_thread, dtype=dtype, mix=mix)
                parts_to_measure[f"{name} {dtype}, {mix}"] = measure
    return parts_to_measure


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--peers", type=Path, required=True, help="the Python of the peers' environment"
    )
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks/RESULTS.md")
    parser.add_argument(
        "--work",
        type=Path,
        default=REPOSITORY / "runs/bench",
        help="inputs, logs and runs; emptied",
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--sides", nargs="+", choices=("ours", *PEERS), default=("ours", *PEERS))
    parser.add_argument("--dtypes", nargs="+", choices=tuple(TOLERANCE), default=default_dtypes())
    parser.add_argument(
        "--mixes", nargs="+", choices=tuple(MIXES), default=tuple(MIXES), help="of chats"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=3, help="of each run; the first is not counted"
    )
    parser.add_argument("--tokens", type=int, default=1536, help="of one step, about")
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="of the scaling figure"
    )
    parser.add_argument("--head-tokens", type=int, default=8192)
    parser.add_argument(
        "--records", type=int, nargs="+", default=[1_000, 1_000_000], help="of the start-up figure"
    )
    parser.add_argument(
        "--expert-tokens", type=int, nargs="+", default=[128, 512, 2048], help="of each rank"
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help="one round of two short steps: shows that all of it runs",
    )
    options = parser.parse_args()
    if options.short:
        options.rounds, options.steps, options.tokens, options.max_length = 1, 2, 1024, 512
        options.ranks, options.head_tokens, options.records = [1, 2], 256, [1_000]
        options.mixes = options.mixes[:1]
        options.expert_tokens = [64]
    return options


def default_dtypes() -> list[str]:
    """Return bfloat16 too where the CPU multiplies it natively: elsewhere nobody would use it."""
    flags = torch.cpu.get_capabilities()
    return (
        ["float32", "bfloat16"]
        if flags.get("avx512_bf16") or flags.get("amx_bf16")
        else ["float32"]
    )


def machine(options: argparse.Namespace) -> dict[str, str]:
    def output_of(*command: str | Path) -> str:
        return subprocess.run(
            list(map(str, command)), capture_output=True, text=True, check=False
        ).stdout.strip()

    cpu_lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next(
        (line.split(":")[1].strip() for line in cpu_lines if "model name" in line),
        platform.processor(),
    )
    flags = torch.cpu.get_capabilities()
    native = [flag for flag in ("avx512_f", "avx512_bf16", "amx_bf16") if flags.get(flag)]
    peer_versions = output_of(
        options.peers,
        "-c",
        "from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in "
        "('torch', 'transformers', 'trl', 'accelerate')))",
    )
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "CPU": f"{cpu}, {os.cpu_count()} cores, {', '.join(native) or 'no AVX-512'}",
        "ours": f"Python {platform.python_version()}, torch {version('torch')}, transformers "
        f"{version('transformers')}",
        "peers": peer_versions,
        "command": shlex.join(["python", *sys.argv]),
    }


def one_thread(options: argparse.Namespace, _: Path, dtype: str, mix: str) -> dict[str, Any]:
    """Run every side in turn on one core, on chats of this mix."""
    chats = options.work / f"{mix.replace(' ', '-')}.jsonl"
    write_chats(chats, options.tokens, options.max_length, mix)
    core = [max(os.sched_getaffinity(0))]
    flops, lengths = model_flops(options.model), document_lengths(options, chats)
    ours, peer_flags = settings(options, chats, dtype, options.model)
    runs: dict[str, list[Side]] = {name: [] for name in options.sides}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in options.sides}
    for turn, name in in_turns(options.sides, options.rounds):
        before = matmul_rate(core, dtype)
        run_name = f"one-{dtype}-{chats.stem}-{name}-{turn}"
        if name == "ours":
            script = ("-m", "benchmarks.step_cpu")
            done = run_ours(run_name, options.work, ours, cores=core, script=script)
            shutil.rmtree(options.work / run_name / "checkpoints", ignore_errors=True)
        else:
            done = run_peer(
                name,
                run_name,
                options.work,
                options.peers,
                {**peer_flags, **PEERS[name]},
                cores=core,
            )
        if done:
            runs[name].append(done)
            rates[name].append((before, matmul_rate(core, dtype)))
    reference = REFERENCE if REFERENCE in runs else next(name for name in runs if name != "ours")
    equal = counted(runs, reference, dtype)
    if not equal:
        return {}
    trained_tokens = runs[reference][0].trained_tokens
    step_flops = flops.per_step(lengths, trained_tokens)
    rows = {
        name: row_of(sides, rates[name], trained_tokens, step_flops)
        for name, sides in equal.items()
    }
    counts = {
        "dtype": dtype,
        "mix": mix,
        "model": options.model.name,
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "trained_tokens": trained_tokens,
        "flops": step_flops,
        "max_length": options.max_length,
        "reference": reference,
        "rounds": options.rounds,
        "steps": options.steps,
    }
    return {"rows": rows, "counts": counts}


def row_of(
    sides: list[Side], rates: list[tuple[float, float]], trained_tokens: int, step_flops: float
) -> dict[str, Any]:
    """Return the figures of one way to train; `rates` were measured before and after each run."""
    return {
        "rates": rates,
        "cpu_seconds": [value for side in sides for value in side.cpu_seconds],
        "trained_tokens_per_s": [
            trained_tokens / value for side in sides for value in side.seconds
        ],
        "share_of_matmul_rate": [
            step_flops / value / mean(around)
            for side, around in zip(sides, rates, strict=True)
            for value in side.seconds
        ],
        "padding": 1 - sides[0].tokens / sides[0].computed_tokens,
        "head_rows": sides[0].head_rows,
        "memory_bytes": median(side.memory_bytes for side in sides),
        "losses": sides[0].losses,
        "data_share": sides[0].data_share and median(side.data_share or 0.0 for side in sides),
    }


def counted(runs: dict[str, list[Side]], reference: str, dtype: str) -> dict[str, list[Side]]:
    """Return the sides that did the reference's work; record why the others have no figure."""
    equal, refused = gated(runs, reference, TOLERANCE[dtype])
    FAILED.extend(f"no figure for {NAMES[name]}: {why}" for name, why in refused.items())
    return equal


def profile(options: argparse.Namespace, chats: Path, dtype: str) -> dict[str, Any]:
    """Return the seconds of one step of shardtune by kind of operation."""
    ours, _ = settings(options, chats, dtype, options.model)
    name, script = f"profile-{dtype}", ("-m", "benchmarks.step_profile")
    is_done = run_ours(
        name, options.work, ours, cores=[max(os.sched_getaffinity(0))], script=script
    )
    shutil.rmtree(options.work / name / "checkpoints", ignore_errors=True)
    if not is_done:
        return {}
    log = (options.work / f"{name}.log").read_text(encoding="utf-8").splitlines()
    *_, last = (line.removeprefix(PROFILE_LABEL) for line in log if line.startswith(PROFILE_LABEL))
    return {"dtype": dtype, "seconds": json.loads(last)}


def matmul_rate(cores: list[int], dtype: str) -> float:
    """FLOP/s of one thread on these cores, measured as a run itself does it."""
    allowed_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    measure_matmul_rate(getattr(torch, dtype), 0)
    rate = measure_matmul_rate(getattr(torch, dtype), 1)
    os.sched_setaffinity(0, allowed_cores)
    return rate


def model_flops(model: Path) -> ModelFlops:
    with torch.device("meta"):
        return count_flops(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)))


def document_lengths(options: argparse.Namespace, chats: Path) -> np.ndarray:
    """Return the tokens of each chat, counted by `inspect-data`."""
    (options.work / "empty.yaml").touch()
    assignments = [
        f"model.path={options.model}",
        f"data.train={chats}",
        f"data.max_length={options.max_length}",
    ]
    command = [
        sys.executable,
        "-m",
        "shardtune",
        "inspect-data",
        "--config",
        options.work / "empty.yaml",
        "--json",
    ]
    log = options.work / "inspect.log"
    assert run_pinned([*command, "--records", str(1 << 30), *assignments], None, log, 600), (
        log.read_text(encoding="utf-8")
    )
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    return np.array([len(json.loads(line)["input_ids"]) for line in lines], np.int64)


def two_ranks(options: argparse.Namespace, chats: Path) -> dict[str, Any]:
    """Compare shardtune with transformers' FSDP over two processes, one core each."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    # A row for each rank at least.
    twice = write_chats(options.work / "twice.jsonl", 2 * options.tokens, options.max_length)
    lines = twice.read_text(encoding="utf-8").splitlines(keepends=True)
    # Where the ranks do not divide the chats, a Trainer repeats one.
    even = options.work / "even.jsonl"
    even.write_text("".join(lines[: len(lines) // 2 * 2]), encoding="utf-8")
    ours, peer_flags = settings(options, even, "float32", options.model)
    runs: dict[str, list[Side]] = {"transformers_fsdp": [], "ours": []}
    for turn, name in in_turns(list(runs), options.rounds):
        run_name = f"two-{name}-{turn}"
        if name == "ours":
            done = run_ours(run_name, options.work, ours, ranks=2, cores=cores)
            shutil.rmtree(options.work / run_name / "checkpoints", ignore_errors=True)
        else:
            done = run_peer(
                name, run_name, options.work, options.peers, peer_flags, ranks=2, cores=cores
            )
        runs[name] += [done] if done else []
    rows = {
        name: {
            "trained_tokens_per_s": [
                side.trained_tokens / value for side in sides for value in side.seconds
            ],
            "memory_bytes": median(side.memory_bytes for side in sides),
            "losses": sides[0].losses,
        }
        for name, sides in counted(runs, "transformers_fsdp", "float32").items()
    }
    return {"rows": rows} if rows else {}


if __name__ == "__main__":
    main()
