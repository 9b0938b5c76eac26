"""Write docs/models.csv: how each causal architecture of transformers is trained here.

A tiny model of each passes the checks of a run before its start. train_fsdp.py then trains it for
three steps on each mesh that it takes, packed and not, beside a plain loop over documents, which
shares no code with the product. All in float32 on the CPU: 40 minutes on two cores.
"""

from __future__ import annotations

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
from functools import partial
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
from benchmarks.tiny import VOCABULARY, tiny_config
from distTest.workloads.script import REPOSITORY
from distTest.workloads.small_models import batch_of
from shardtune.checkpoint.assets import SOURCE, list_source, model_assets
from shardtune.checkpoint.export.model_files import WholeModel
from shardtune.checkpoint.train_state import model_kinds
from shardtune.cluster.child import Child, Pipe, results
from shardtune.config import Config
from shardtune.config_io import load_config
from shardtune.distributed.layout import Layout
from shardtune.errors import UserError, first_line
from shardtune.log import quiet_libraries
from shardtune.model import documents
from shardtune.model.build import require_trainable
from shardtune.model.documents.attention_check import require_documents_apart
from shardtune.model.documents.attention_choice import Attention, decide_attention
from shardtune.model.documents.attention_trial import LogitsTrial
from shardtune.model.flops import NotCounted, count_flops
from shardtune.model.lora import choose_targets
from shardtune.model.loss import summed_loss, use_loss_head
from shardtune.model.source.config_json import not_trained
from shardtune.model.source.files import read_model_config
from shardtune.model.source.text_model import build_with_towers, drop_towers
from shardtune.model.stages import require_composable
from shardtune.model.tensor_parallel import require_separable
from shardtune.model.traits import has_experts, layer_types
from shardtune.planner.simulation.simulate import fake_world

TABLE = REPOSITORY / "docs/models.csv"
Row = dict[str, str]
_STAGES, _SPREAD = "parallel.stages=2", "parallel.expert=2"
_SHARED, _CUT = "parallel.context=2", "parallel.tensor=2"
MESHES = {"two stages": _STAGES, "experts spread": _SPREAD, "rows shared": _SHARED, "tensor": _CUT}
_PACKED, _ALONE = ("data.packing=true",), ("data.packing=false", "train.micro_batch_size=2")
_SELECTIVE, _FULL = (f"model.activation_checkpointing={how}" for how in ("selective", "full"))
# The column, ranks and settings of each run.
RUNS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("one rank", 1, (*_PACKED, _SELECTIVE)),
    ("two ranks", 2, (*_PACKED, _FULL)),
    ("two stages", 2, (*_PACKED, _STAGES)),
    ("experts spread", 2, (*_PACKED, _FULL, _SPREAD)),
    ("rows shared", 2, (*_PACKED, _FULL, _SHARED)),
    ("tensor", 2, (*_PACKED, _FULL, _CUT)),
    ("one rank", 1, _ALONE),
    ("two ranks", 2, _ALONE),
    ("two stages", 2, (*_ALONE, _STAGES)),
)
DISTANCES = ("gradients", "one rank", "two ranks", *MESHES, "losses", "weights", "rounding")
COLUMNS = ("model type", "rows", "layers", *DISTANCES, "MFU", "LoRA", "causes")
LENGTHS = (5, 1, 23, 12, 40)  # tokens of documents; the windows of tiny models have 8
STEPS = 3
_LR, _EPS = 3e-3, 1e-3  # a larger eps keeps rounding of tiny gradients from becoming an update
_EOS, _FIRST, _LETTERS = 1, 3, string.ascii_letters
_RUN_S, _ROW_S = 120, 720
_MOST_PARAMETERS = 30_000_000
_CPU = torch.device("cpu")
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
    row = in_own_process(checked, kind)
    return in_own_process(partial(trained, row), kind) if "one rank" in row else row


def in_own_process(work: Callable[[str], Row], kind: str) -> Row:
    """Return the row that `work` makes in a fork: all modules are loaded there already."""
    child = Child("its process", _send_row, work, kind)
    (row,) = results([child], _ROW_S, lambda _: f"takes more than {_ROW_S} s")
    return left_out(kind, "fails", row["problems"][0]) if "problems" in row else row


def _send_row(pipe: Pipe, work: Callable[[str], Row], kind: str) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    torch.set_num_threads(1)  # a fork has no other threads
    quiet_libraries(is_main=False)
    pipe.send(work(kind))


def left_out(kind: str, rows: str, cause: str) -> Row:
    return {"model type": kind, "rows": rows, "causes": _words(cause, kind)}


def _words(text: str, kind: str) -> str:
    """Return the first clause of a refusal, without the key and the name of the model."""
    clause = text.partition(" - ")[0]
    clause = re.sub(r"^(parallel|lora|model|data)\.[a-z_]+(=\S+)?:? ", "", clause)
    return re.sub(rf"^{re.escape(kind)} ", "", re.sub(r"/tmp/\w+", "a folder", clause))


def checked(kind: str) -> Row:
    """Return an architecture's row, with "yes" for each mesh whose checks it passes."""
    if refused := not_trained(kind):
        return left_out(kind, "refused", refused)
    rows = "no tiny model"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            if tiny_config(kind).is_encoder_decoder:
                return left_out(kind, "not causal by default", "a decoder made for an encoder")
            with torch.device("meta"):
                parameters = build_with_towers(tiny_config(kind)).num_parameters()
            if parameters > _MOST_PARAMETERS:
                return left_out(kind, rows, f"{parameters:,} parameters with all widths small")
            model = save_tiny_model(kind, folder)
            _require_forward(model, folder)
            rows = "fails"
            return _checked_row(kind, model, folder)
        except UserError as error:
            return left_out(kind, "refused", str(error))
        except Exception as error:  # each architecture checks its settings in its own way
            return left_out(kind, rows, f"{type(error).__name__}: {first_line(error)}")


def save_tiny_model(kind: str, folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    model = build_with_towers(tiny_config(kind), dtype=torch.float32)
    model.config.use_cache = model.config.get_text_config().use_cache = False
    model.save_pretrained(folder)
    return model


def _require_forward(model: PreTrainedModel, folder: Path) -> None:
    try:
        with torch.no_grad():
            model(input_ids=torch.arange(3, 15).view(1, -1))
    except Exception:
        _require(_config(folder, "data.packing=false"))  # it may refuse the architecture by name
        raise


def _checked_row(kind: str, model: PreTrainedModel, folder: Path) -> Row:
    _require(_config(folder, "data.packing=false"))
    _require_same_names(folder)
    drop_towers(model)
    not_packed = problem_of(lambda: _require(_config(folder)))
    if not is_causal(model):
        if not_packed:
            raise UserError(not_packed)
        raise ValueError("its tokens see those behind them, and no check refuses it")
    packing = f"data.packing={str(not not_packed).lower()}"
    attention, loss_off, gradients_off = compare_gradients(model, _config(folder, packing))
    causes = {"rows": not_packed or attention.text.rpartition(" (")[2].removesuffix(")")}
    if rows_of(attention) == "flat":
        causes = {}
    causes["MFU"] = problem_of(lambda: count_flops(model))
    lora = _config(folder, "lora.rank=4").lora
    causes["LoRA"] = problem_of(lambda: choose_targets(model, lora))
    for mesh, degree in MESHES.items():
        # Each stage needs a micro-batch.
        config = _config(folder, packing, degree, "train.gradient_accumulation_steps=2")
        causes[mesh] = problem_of(partial(_require, config, ranks=2))
    if rows_of(attention) != "flat" and not causes["rows shared"]:
        # Where no small copy can be made, the loaded weights show it.
        causes["rows shared"] = f"each attention layer is called alone ({attention.text})"
    row = {name: "no" if cause else "yes" for name, cause in causes.items()}
    if not has_experts(model):
        row["experts spread"] = causes["experts spread"] = ""
    said = [f"{name}: {_words(cause, kind)}" for name, cause in causes.items() if cause]
    return row | {
        "model type": kind,
        "rows": rows_of(attention),
        "layers": ", ".join(dict.fromkeys(layer_types(model.config.get_text_config()))),
        "losses": _number(loss_off),
        "gradients": _number(gradients_off),
        "one rank": "yes",
        "two ranks": "yes",
        "causes": "; ".join(said),
    }


def _config(folder: Path, *assignments: str) -> Config:
    given = [f"model.path={folder}", "data.max_length=128", "model.compute_dtype=float32"]
    return load_config(REPOSITORY / "examples/demo.yaml", [*given, *assignments], {})


def problem_of(work: Callable[[], Any]) -> str:
    """Return the text of a refusal or of another error, or an empty text."""
    try:
        work()
    except (UserError, NotCounted) as error:
        return str(error)
    except Exception as error:
        return f"ends with {type(error).__name__}: {first_line(error)}"
    return ""


def _require(config: Config, ranks: int = 1) -> None:
    """Make the checks of a run that need the model's config.json alone."""
    model_config = read_model_config(config.model, config.data.max_length)
    with fake_world(Layout.of(config, ranks), ranks) as world:
        require_trainable(config, model_config, world)
    for check in (require_documents_apart, require_composable, require_separable):
        check(Layout.of(config), model_config)


def _require_same_names(folder: Path) -> None:
    assets = model_assets(folder) | {SOURCE: json.dumps(list_source(str(folder))).encode()}
    with torch.device("meta"):
        model = build_with_towers(read_model_config(_config(folder).model, 128))
    drop_towers(model)
    WholeModel(model_kinds(model), model.all_tied_weights_keys, "source", assets, None)


@torch.no_grad()
def is_causal(model: PreTrainedModel) -> bool:
    """Return whether another last token leaves the logits of the tokens before it as they are."""
    ids = torch.arange(3, 15).view(1, -1)
    other = ids.clone()
    other[0, -1] += 50
    a, b = (model.eval()(input_ids=row).logits[0, :-1] for row in (ids, other))
    return bool(torch.allclose(a, b, rtol=1e-4, atol=1e-5 * a.std().item()))


def compare_gradients(model: PreTrainedModel, config: Config) -> tuple[Attention, float, float]:
    """Return how a model attends, and how far its loss and gradients are from a loop's."""
    model.train()
    row, flags = some_documents()
    expected = one_by_one(model, row, flags)
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    attention = decide_attention(
        LogitsTrial(model, Layout.of(config), _CPU), config.data.max_length
    )
    use_loss_head(model, _CPU)
    batch = batch_of(row, flags, attention.is_flat)
    with documents.of(batch):
        loss = summed_loss(model.train(), batch)
        loss.backward()
    computed = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    # A parameter may have a gradient on one side alone; without one it counts as 0.
    differences = (
        computed.get(n, torch.zeros(())) - gradients.get(n, torch.zeros(()))
        for n in gradients.keys() | computed.keys()
    )
    off = sum(float(d.double().square().sum()) for d in differences) ** 0.5
    return attention, abs(loss.item() / expected.item() - 1), off / norm if norm else 0.0


def rows_of(attention: Attention) -> str:
    if not attention.is_flat:
        return "cannot pack"
    if attention.by_layer:
        return "flat, by layer"
    return "flat" if attention.by_document else "under a mask"


def some_documents() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    source = torch.Generator().manual_seed(1)
    row = [torch.randint(3, VOCABULARY - 20, (n,), generator=source) for n in LENGTHS]
    return row, [torch.rand(n, generator=source) < 0.4 for n in LENGTHS]


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


def trained(row: Row, kind: str) -> Row:
    """Return the row with the distances of all runs from the loop in place of each "yes"."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["SHARDTUNE_CACHE"] = str(folder / "cache")
        model = save_tiny_model(kind, folder / "model")
        save_tokenizer(folder / "model")
        write_data(folder / "data.jsonl")
        rounding = _rounding(copy.deepcopy(model))
        expected = plain_training(model)
        model.save_pretrained(folder / "expected")
        offs: dict[str, list[float]] = {"losses": [float(row["losses"])]}
        for number, (column, ranks, settings) in enumerate(RUNS):
            if row[column] != "yes" or (row["rows"] == "cannot pack" and _PACKED[0] in settings):
                continue
            if not model.supports_gradient_checkpointing:
                settings = tuple(key for key in settings if key not in (_SELECTIVE, _FULL))
            run_dir = folder / f"run-{number}"
            if problem := train(folder / "model", run_dir, ranks, settings):
                return left_out(kind, "fails", f"{column}: {problem}")
            loss, norm, weights = distances(run_dir, expected, folder / "expected")
            of_run = ("losses", loss), (column, loss), (column, norm), ("weights", weights)
            for where, off in of_run:
                offs.setdefault(where, []).append(off)
    numbers = {where: _number(largest(values)) for where, values in offs.items()}
    return row | numbers | {"rounding": "" if rounding is None else _number(rounding)}


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
    lines = []
    for ids, flags in zip(*made_documents(), strict=True):
        text, prompt = "".join(_LETTERS[i - _FIRST] for i in ids[:-1]), int((~flags).sum())
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


def train(model: Path, run_dir: Path, ranks: int, settings: Sequence[str]) -> str:
    """Run train_fsdp.py on `ranks` forks of this process; return how it failed, if it did."""
    given = {
        "model.path": model,
        "data.train": model.parent / "data.jsonl",
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
    forks = [
        Child(f"rank {rank}", _be_rank, rank, ranks, store.port, arguments) for rank in range(ranks)
    ]
    reports = results(forks, _RUN_S, lambda rank: f"rank {rank} takes more than {_RUN_S} s")
    return "; ".join(problem for report in reports for problem in report.get("problems", []))


def _be_rank(pipe: Pipe, rank: int, ranks: int, port: int, arguments: Sequence[str]) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    places = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    agent = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {name: str(value) for name, value in (numbers | places | agent).items()}
    multiprocessing.set_start_method("fork", force=True)
    sys.argv = ["train_fsdp.py", "--config", os.devnull, *arguments]
    train_fsdp.main()
    pipe.send({})


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
