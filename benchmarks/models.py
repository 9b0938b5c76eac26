"""Write docs/models.csv: how each causal architecture of transformers is trained here.

train_fsdp.py trains a tiny model of each for three steps on each mesh that it takes, packed and
not, beside a plain loop over documents, which shares no code with the product. All in float32 on
the CPU: 40 minutes on two cores.
"""

import copy
import csv
import json
import math
import multiprocessing
import os
import random
import re
import string
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

import train_fsdp
from distTest.workloads.chats import write_jsonl
from distTest.workloads.script import REPOSITORY
from distTest.workloads.tiny import tiny_config
from shardtune.cluster.child import Child, Pipe, results
from shardtune.config import LoraConfig
from shardtune.errors import Ending, UserError, first_line
from shardtune.log import quiet_libraries
from shardtune.model.flops import NotCounted, count_flops
from shardtune.model.lora import choose_targets
from shardtune.model.parts import has_experts, layer_types, not_trained
from shardtune.model.source.text_model import build_with_towers, drop_towers

TABLE = REPOSITORY / "docs/models.csv"
Row = dict[str, str]
MESHES = {
    "two stages": "parallel.stages=2",
    "experts spread": "parallel.expert=2",
    "rows shared": "parallel.context=2",
    "tensor": "parallel.tensor=2",
}
_PACKED, _ALONE = ("data.packing=true",), ("data.packing=false", "train.micro_batch_size=2")
_SELECTIVE, _FULL = (f"model.activation_checkpointing={how}" for how in ("selective", "full"))
# The column, ranks and settings of each run.
RUNS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("one rank", 1, (*_PACKED, _SELECTIVE)),
    ("two ranks", 2, (*_PACKED, _FULL)),
    ("two stages", 2, (*_PACKED, MESHES["two stages"])),
    *((mesh, 2, (*_PACKED, _FULL, MESHES[mesh])) for mesh in [*MESHES][1:]),
    ("one rank", 1, _ALONE),
    ("two ranks", 2, _ALONE),
    ("two stages", 2, (*_ALONE, MESHES["two stages"])),
)
DISTANCES = ("one rank", "two ranks", *MESHES, "losses", "weights", "rounding")
COLUMNS = ("model type", "rows", "layers", *DISTANCES, "MFU", "LoRA", "causes")
_ROWS = {"without a mask": "flat", "by one call of each": "flat, by layer", "none, as": "flat"}
STEPS = 3
_LR, _EPS = 3e-3, 1e-3  # a larger eps keeps rounding of tiny gradients from becoming an update
_EOS, _FIRST, _LETTERS = 1, 3, string.ascii_letters
_RUN_S, _ROW_S = 120, 720
_REFUSED = "refused: "  # begins the problem of a run that ended by name
_MOST_PARAMETERS = 30_000_000
Losses = tuple[list[float], list[float]]  # and norms of gradients


def add_options(parser: ArgumentParser) -> None:
    """Add none: all rows are written."""


def main(options: Namespace) -> None:
    with ThreadPoolExecutor(2) as pool, TABLE.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(pool.map(row_of, architectures()))


def architectures() -> list[str]:
    """Return the types of models that transformers opens for text, alone or within a larger one."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})


def row_of(kind: str) -> Row:
    """Return an architecture's row, made in a fork: all modules are loaded there already."""
    child = Child("its process", _send_row, kind)
    (row,) = results([child], _ROW_S, lambda _: f"takes more than {_ROW_S} s")
    return left_out(kind, "fails", row["problems"][0]) if "problems" in row else row


def _send_row(pipe: Pipe, kind: str) -> None:
    torch.set_num_threads(1)  # a fork has no other threads
    quiet_libraries(is_main=False)
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as name:
        os.environ["SHARDTUNE_CACHE"] = f"{name}/cache"
        _write_output_to(Path(name) / "row.log")
        pipe.send(_row_of(kind, Path(name)))


def _write_output_to(log: Path) -> None:
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, 1)
    os.dup2(target, 2)


def left_out(kind: str, rows: str, cause: str) -> Row:
    return {"model type": kind, "rows": rows, "causes": _words(cause, kind)}


def _words(text: str, kind: str) -> str:
    """Return the first clause of a refusal, without the key and the name of the model."""
    clause = first_line(text).partition(" - ")[0]
    clause = re.sub(r"^(parallel|lora|model|data)\.[a-z_]+(=\S+)?:? ", "", clause)
    return re.sub(rf"^{re.escape(kind)} ", "", re.sub(r"/tmp/\w+", "a folder", clause))


def _row_of(kind: str, folder: Path) -> Row:
    if refused := not_trained(kind):
        return left_out(kind, "refused", refused)
    try:
        if tiny_config(kind).is_encoder_decoder:
            return left_out(kind, "not causal by default", "a decoder made for an encoder")
        with torch.device("meta"):
            parameters = build_with_towers(tiny_config(kind)).num_parameters()
        if parameters > _MOST_PARAMETERS:
            too_large = f"{parameters:,} parameters with all widths small"
            return left_out(kind, "no tiny model", too_large)
        model = save_tiny_model(kind, folder / "model")
        save_tokenizer(folder / "model")
        write_data(folder / "data.jsonl")
        return _trained_row(kind, model, folder)
    except UserError as error:
        return left_out(kind, "refused", str(error))
    except Exception as error:  # each architecture checks its settings in its own way
        return left_out(kind, "no tiny model", f"{type(error).__name__}: {first_line(error)}")


def save_tiny_model(kind: str, folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model = build_with_towers(tiny_config(kind), dtype=torch.float32)
    model.config.use_cache = model.config.get_text_config().use_cache = False
    model.save_pretrained(folder)
    return model


def _trained_row(kind: str, model: PreTrainedModel, folder: Path) -> Row:
    """Return the row of a model that can be made: the distances of its runs from the loop.

    Raises:
        UserError: a run on one rank refuses the model.
    """
    first = train(folder / "model", folder / "run-0", *RUNS[0][1:], model)
    if first.startswith(_REFUSED):
        raise UserError(first.removeprefix(_REFUSED))
    rounding = _rounding(copy.deepcopy(model))
    text_model = copy.deepcopy(model)
    drop_towers(text_model)
    if not is_causal(text_model):
        return left_out(kind, "fails", "its tokens see those behind them, and no check refuses it")
    causes = {"MFU": _problem(lambda: count_flops(text_model))}
    causes["LoRA"] = _problem(lambda: choose_targets(text_model, LoraConfig(rank=4)))
    expected = plain_training(model)
    model.save_pretrained(folder / "expected")
    offs: dict[str, list[float]] = {}
    for number, (column, ranks, settings) in enumerate(RUNS):
        if column in causes or (column == "experts spread" and not has_experts(model)):
            continue
        run_dir = folder / f"run-{number}"
        problem = train(folder / "model", run_dir, ranks, settings, model) if number else first
        if problem.startswith(_REFUSED) and column in MESHES:
            causes[column] = problem.removeprefix(_REFUSED)
            continue
        if problem:
            return left_out(kind, "fails", f"{column}: {problem}")
        loss, norm, weights = distances(run_dir, expected, folder / "expected")
        of_run = ("losses", loss), (column, loss), (column, norm), ("weights", weights)
        for where, off in of_run:
            offs.setdefault(where, []).append(off)
    attention = re.search("Attention: (.*)", (folder / "run-0.log").read_text("utf-8"))
    text = attention[1].removesuffix("; rows have no padding") if attention else ""
    rows = next((name for words, name in _ROWS.items() if words in text), "under a mask")
    said = {"rows": text.rpartition(" (")[2].removesuffix(")")} if rows != "flat" else {}
    said |= {name: cause for name, cause in causes.items() if cause}
    return {
        "model type": kind,
        "rows": rows,
        "layers": ", ".join(dict.fromkeys(layer_types(model.config.get_text_config()))),
        **{name: "no" if cause else "yes" for name, cause in causes.items()},
        **{where: _number(largest(values)) for where, values in offs.items()},
        "rounding": "" if rounding is None else _number(rounding),
        "causes": "; ".join(f"{name}: {_words(cause, kind)}" for name, cause in said.items()),
    }


def _problem(work: Callable[[], Any]) -> str:
    """Return the text of a refusal, or an empty text."""
    try:
        work()
    except (UserError, NotCounted) as error:
        return str(error)
    return ""


@torch.no_grad()
def is_causal(model: PreTrainedModel) -> bool:
    """Return whether another last token leaves the logits of the tokens before it as they are."""
    ids = torch.arange(3, 15).view(1, -1)
    other = ids.clone()
    other[0, -1] += 50
    a, b = (model.eval()(input_ids=row).logits[0, :-1] for row in (ids, other))
    return bool(torch.allclose(a, b, rtol=1e-4, atol=1e-5 * a.std().item()))


def one_by_one(
    model: PreTrainedModel, row: Sequence[torch.Tensor], flags: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the summed loss of all logits, each document in a forward of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for ids, is_trained in zip(row, flags, strict=True):
        logits = model(input_ids=ids.view(1, -1)).logits[0]
        losses = -logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total = total + losses[is_trained[1:]].double().sum()
    return total


def _number(off: float) -> str:
    return f"{off:.1e}"


def made_documents() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tokens of each document of a run, and which of them are trained."""
    # From one token to 40 are trained, so that no average hides a wrong weight of a document.
    source = random.Random(3)
    sizes = [(3, 1), (20, 1), (1, 4), (9, 40), (30, 9), (2, 2), (44, 3), (5, 17), (12, 1), (6, 25)]
    row = [
        torch.tensor([source.randrange(_FIRST, _FIRST + 52) for _ in range(sum(size))] + [_EOS])
        for size in sizes
    ]
    flags = [torch.arange(len(ids)) >= size[0] for ids, size in zip(row, sizes, strict=True)]
    return row, flags


def write_data(path: Path) -> None:
    records = []
    for ids, flags in zip(*made_documents(), strict=True):
        text, prompt = "".join(_LETTERS[i - _FIRST] for i in ids[:-1]), int((~flags).sum())
        records.append({"prompt": text[:prompt], "completion": text[prompt:]})
    write_jsonl(path, records)


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer whose tokens are letters, whatever class reads it."""
    names = {letter: _FIRST + i for i, letter in enumerate(_LETTERS)}
    backend = Tokenizer(BPE(names | {"<s>": 0, "</s>": _EOS, "<pad>": 2}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)


def plain_training(model: PreTrainedModel) -> Losses:
    """Train with AdamW, one document at a time, and return losses and norms."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LR, betas=(0.9, 0.95), eps=_EPS, weight_decay=0.0
    )
    losses, norms = [], []
    row, flags = made_documents()
    tokens = sum(int(is_trained.sum()) for is_trained in flags)
    for _ in range(STEPS):
        loss = one_by_one(model, row, flags) / tokens
        loss.backward()
        losses.append(loss.item())
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
    return largest(relative(*pair) for loop in loops for pair in zip(loop, exact, strict=True))


def train(
    path: Path, run_dir: Path, ranks: int, settings: Sequence[str], model: PreTrainedModel
) -> str:
    """Run train_fsdp.py on `ranks` forks of this process; return how it failed, if it did.

    A refusal begins with `_REFUSED`. The output is in a file beside the run's folder.
    """
    if not model.supports_gradient_checkpointing:
        settings = [key for key in settings if key not in (_SELECTIVE, _FULL)]
    given = {
        "model.path": path,
        "data.train": path.parent / "data.jsonl",
        "run.dir": run_dir,
        "model.compute_dtype": "float32",
        "export.dtype": "float32",
        "data.max_length": 64,
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
    forks = [
        Child(f"rank {rank}", _be_rank, log, rank, ranks, store.port, arguments)
        for rank in range(ranks)
    ]
    reports = results(forks, _RUN_S, lambda rank: f"rank {rank} takes more than {_RUN_S} s")
    return next((problem for report in reports for problem in report.get("problems", [])), "")


def _be_rank(
    pipe: Pipe, log: Path, rank: int, ranks: int, port: int, arguments: Sequence[str]
) -> None:
    _write_output_to(log if rank == 0 else Path(os.devnull))
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    places = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    agent = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {name: str(value) for name, value in (numbers | places | agent).items()}
    multiprocessing.set_start_method("fork", force=True)
    sys.argv = ["train_fsdp.py", "--config", os.devnull, *arguments]
    try:
        train_fsdp.main()
        pipe.send({})
    except Ending as refusal:
        pipe.send({"problems": [_REFUSED + refusal.problems[0]]})


def distances(run_dir: Path, expected: Losses, trained: Path) -> tuple[float, float, float]:
    """Return how far losses, norms and weights of a run are from the loop's."""
    entries = map(json.loads, (run_dir / "metrics.jsonl").read_text("utf-8").splitlines())
    steps = [entry for entry in entries if entry["kind"] == "step"]
    exported, stored = dict(_tensors(run_dir / "model")), dict(_tensors(trained))
    if names := exported.keys() ^ stored.keys():
        raise ValueError(f"exports other tensors: {', '.join(sorted(names)[:3])}")
    # The norm of a weight may be near 0 (biases begin at 0). The distance is then relative to the
    # largest change that the steps can make.
    weights = largest(
        _norm(exported[name] - tensor) / max(_norm(tensor), STEPS * _LR * tensor.numel() ** 0.5)
        for name, tensor in stored.items()
    )
    loss, norm = (
        relative([step[key] for step in steps], numbers)
        for key, numbers in zip(("loss", "grad_norm"), expected, strict=True)
    )
    return loss, norm, weights


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())


def largest(numbers: Iterable[float]) -> float:
    return float(torch.tensor(list(numbers), dtype=torch.float64).max())  # NaN, if there is one


def relative(numbers: Sequence[float], expected: Sequence[float]) -> float:
    return largest(abs(a / b - 1) for a, b in zip(numbers, expected, strict=True))


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
