"""Compare runs of a tiny model of each architecture with a plain loop, for docs/models.csv.

train_fsdp.py trains each model for three steps: packed and not, on one rank, on two ranks and in
two stages; and packed with experts spread over two ranks, with two ranks that share each row, and
with two that share matrices too.
The loop takes one document at a time and shares no code with the product. Writes
benchmarks/runs.json and the tables of the page, in half an hour on two cores.
"""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import random
import runpy
import string
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.models_page import RESULTS, RUNS, Row, write_page
from benchmarks.tiny import tiny_config
from distTest.workloads.script import REPOSITORY
from shardtune.log import quiet_libraries
from shardtune.model.source.text_model import build_with_towers

STEPS = 3
_LR, _EPS = 3e-3, 1e-3  # a larger eps keeps rounding of tiny gradients from becoming an update
_ROW = 64
_EOS, _FIRST, _LETTERS = 1, 3, string.ascii_letters
_SECONDS = 120  # for a run
_PACKED, _ALONE = ("data.packing=true",), ("data.packing=false", "train.micro_batch_size=2")
_SELECTIVE, _FULL = (f"model.activation_checkpointing={how}" for how in ("selective", "full"))
_STAGES = "parallel.stages=2"
# The ranks and settings of each run.
SETTINGS: dict[str, tuple[int, tuple[str, ...]]] = {
    "packed, 1 rank": (1, (*_PACKED, _SELECTIVE)),
    "packed, 2 ranks": (2, (*_PACKED, _FULL)),
    "packed, 2 stages": (2, (*_PACKED, _STAGES)),
    "packed, experts spread": (2, (*_PACKED, _FULL, "parallel.expert=2")),
    "packed, rows shared": (2, (*_PACKED, _FULL, "parallel.context=2")),
    "packed, matrices cut": (2, (*_PACKED, _FULL, "parallel.tensor=2")),
    "unpacked, 1 rank": (1, _ALONE),
    "unpacked, 2 ranks": (2, _ALONE),
    "unpacked, 2 stages": (2, (*_ALONE, _STAGES)),
}
Losses = tuple[list[float], list[float]]  # and norms of gradients


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=[], help="architectures to do again")


def main(options: Namespace) -> None:
    rows: dict[str, Row] = json.loads(RESULTS.read_text("utf-8"))
    tried = [kind for kind, row in rows.items() if "rows" in row]
    results = json.loads(RUNS.read_text("utf-8")) if RUNS.exists() else {}
    kinds = options.only or tried
    with ThreadPoolExecutor(2) as pool:
        distances = pool.map(lambda kind: distances_of(kind, runs_of(rows[kind])), kinds)
        for kind, row in zip(kinds, distances, strict=True):
            results[kind] = row
            print(kind, json.dumps(row), flush=True)
            ordered = {kind: results[kind] for kind in tried if kind in results}
            RUNS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    write_page()


def distances_of(kind: str, names: Sequence[str]) -> Row:
    """Return the distance of each run of an architecture from the loop, or the run's error."""
    import train_fsdp  # noqa: F401, for the forks

    torch.set_num_threads(1)  # a fork has no other threads
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "distances.json"
        log = Path(folder) / "loop.log"
        _in_fork(log, 6 * _SECONDS, lambda: _write_distances(kind, names, Path(folder), out))
        if not out.exists():
            return {"loop": f"ends with {log.read_text('utf-8').splitlines()[-1]}"}
        return dict(json.loads(out.read_text("utf-8")))


def _write_distances(kind: str, names: Sequence[str], folder: Path, out: Path) -> None:
    quiet_libraries(is_main=False)
    os.environ["SHARDTUNE_CACHE"] = str(folder / "cache")
    torch.manual_seed(0)
    model = build_with_towers(tiny_config(kind), dtype=torch.float32)
    model.config.use_cache = model.config.get_text_config().use_cache = False
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    write_data(folder / "data.jsonl")
    rounding = _rounding(copy.deepcopy(model))
    expected = plain_training(model)
    model.save_pretrained(folder / "expected")
    distances: Row = {"rounding": rounding}
    for name in names:
        ranks, settings = SETTINGS[name]
        if not model.supports_gradient_checkpointing:
            settings = tuple(key for key in settings if key not in (_SELECTIVE, _FULL))
        run_dir = folder / name.replace(", ", "-").replace(" ", "-")
        problem = train(folder / "model", run_dir, ranks, settings)
        distances[name] = problem or _distance(run_dir, expected, folder / "expected")
        out.write_text(json.dumps(distances), encoding="utf-8")


def runs_of(row: Row) -> list[str]:
    """Return the names of the runs that an architecture with this row of the table can take."""
    ways = ("packed", "unpacked") if row["rows"] != "padded" else ("unpacked",)
    meshes = {
        "stages": [f"{way}, 2 stages" for way in ways],
        "spread": ["packed, experts spread"],
        "context": ["packed, rows shared"],
        "tensor": ["packed, matrices cut"],
    }
    alone = [f"{way}, {ranks}" for way in ways for ranks in ("1 rank", "2 ranks")]
    return [*alone, *(name for mesh, runs in meshes.items() if row[mesh] == "yes" for name in runs)]


def documents() -> list[tuple[list[int], int]]:
    """Return the tokens of each document, and the number of tokens in its prompt."""
    # From one token to 40 are trained, so that no average hides a wrong weight of a document.
    source = random.Random(3)
    sizes = [(3, 1), (20, 1), (1, 4), (9, 40), (30, 9), (2, 2), (44, 3), (5, 17), (12, 1), (6, 25)]
    return [
        ([source.randrange(_FIRST, _FIRST + 52) for _ in range(prompt + answer)] + [_EOS], prompt)
        for prompt, answer in sizes
    ]


def write_data(path: Path) -> None:
    lines = []
    for ids, prompt in documents():
        text = "".join(_LETTERS[i - _FIRST] for i in ids[:-1])
        lines.append(json.dumps({"prompt": text[:prompt], "completion": text[prompt:]}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer whose tokens are letters, whatever class reads it."""
    names = {letter: _FIRST + i for i, letter in enumerate(_LETTERS)}
    backend = Tokenizer(BPE(names | {"<s>": 0, "</s>": _EOS, "<pad>": 2}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)


def plain_training(model: PreTrainedModel) -> Losses:
    """Train one document at a time with AdamW, and return losses and norms."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LR, betas=(0.9, 0.95), eps=_EPS, weight_decay=0.0
    )
    losses, norms, data = [], [], documents()
    tokens = sum(len(ids) - prompt for ids, prompt in data)
    for _ in range(STEPS):
        total = 0.0
        for ids, prompt in data:
            logits = model(input_ids=torch.tensor([ids])).logits[0]
            targets = torch.tensor(ids[prompt:])
            nll = F.cross_entropy(logits[prompt - 1 : -1], targets, reduction="sum")
            (nll / tokens).backward()
            total += nll.item()
        losses.append(total / tokens)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def _rounding(model: PreTrainedModel) -> float | None:
    """Return the distance of losses and norms of the loop in float32 from those in float64.

    Take the larger one of transformers' usual and eager attention.
    """
    try:
        exact = plain_training(copy.deepcopy(model).double())
        loops = [plain_training(copy.deepcopy(model))]
        model.set_attn_implementation("eager")
        loops.append(plain_training(model))
    except (RuntimeError, ValueError):  # a layer stays float32, or has no eager attention
        return None
    return max(off for loop in loops for off in relative(loop, exact).values())


def train(model: Path, run_dir: Path, ranks: int, settings: Sequence[str]) -> str | None:
    """Run train_fsdp.py on `ranks` forks of this process; return how it failed, or None."""
    given = {
        "model.path": model,
        "data.train": model.parent / "data.jsonl",
        "run.dir": run_dir,
        "model.compute_dtype": "float32",
        "export.dtype": "float32",
        "data.max_length": _ROW,
        "optimizer.lr": _LR,
        "optimizer.eps": _EPS,
        "scheduler.name": "constant",
        "scheduler.warmup_ratio": 0,
        "train.epochs": STEPS,
        "train.gradient_accumulation_steps": 16,  # a step is an epoch
        "train.max_grad_norm": "null",
        "checkpoint.every_steps": 0,
    }
    arguments = [*(f"{key}={value}" for key, value in given.items()), *settings]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    log = run_dir.with_suffix(".log")
    works = (partial(_be_rank, rank, ranks, store.port, arguments) for rank in range(ranks))
    codes = _in_fork(log, _SECONDS, *works)
    if not any(codes):
        return None
    errors = [line for line in log.read_text("utf-8").splitlines() if line.startswith("ERROR: ")]
    return errors[-1].removeprefix("ERROR: ") if errors else f"ends with {codes}"


def _in_fork(log: Path, seconds: float, *works: Any) -> list[int | None]:
    """Run each of these in a fork of this process, and return their exit codes."""

    def logged(work: Any) -> None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        work()

    forks = multiprocessing.get_context("fork")
    processes = [forks.Process(target=logged, args=(work,)) for work in works]
    for process in processes:
        process.start()
    wait([processes[0].sentinel], seconds)
    for process in processes:
        process.join(10)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def _be_rank(rank: int, ranks: int, port: int, arguments: Sequence[str]) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    places = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    agent = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {name: str(value) for name, value in (numbers | places | agent).items()}
    multiprocessing.set_start_method("fork", force=True)
    sys.argv = [str(REPOSITORY / "train_fsdp.py"), "--config", os.devnull, *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())


def _distance(run_dir: Path, expected: Losses, trained: Path) -> Row | str:
    entries = map(json.loads, (run_dir / "metrics.jsonl").read_text("utf-8").splitlines())
    steps = [entry for entry in entries if entry["kind"] == "step"]
    if len(steps) != STEPS:
        return f"takes {len(steps)} steps instead of {STEPS}"
    exported, stored = dict(_tensors(run_dir / "model")), dict(_tensors(trained))
    if names := exported.keys() ^ stored.keys():
        return f"exports other tensors: {', '.join(sorted(names)[:3])}"
    # The norm of a weight may be near 0 (biases begin at 0). The distance is then relative to the
    # largest change that the steps can make.
    weights = _largest(
        _norm(exported[name] - tensor) / max(_norm(tensor), STEPS * _LR * tensor.numel() ** 0.5)
        for name, tensor in stored.items()
    )
    losses = [step["loss"] for step in steps], [step["grad_norm"] for step in steps]
    return {**relative(losses, expected), "weights": weights}


def _largest(numbers: Iterable[float]) -> float:
    return float(torch.tensor(list(numbers), dtype=torch.float64).max())  # NaN, if there is one


def relative(losses: Losses, expected: Losses) -> dict[str, float]:
    return {
        name: _largest(abs(a / b - 1) for a, b in zip(*pair, strict=True))
        for name, pair in zip(("loss", "norm"), zip(losses, expected, strict=True), strict=True)
    }


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
