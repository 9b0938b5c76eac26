"""Find out what every causal architecture of transformers can do here, for docs/models.csv.

A tiny model of each passes the checks of a run before its start, in one process in float32 on the
CPU. Writes benchmarks/models.json and the tables of the page, in ten minutes on two cores.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from benchmarks.models_page import LENGTHS, RESULTS, Row, write_page
from benchmarks.tiny import VOCABULARY, tiny_config
from distTest.workloads.batch import batch_of
from distTest.workloads.script import REPOSITORY
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
from shardtune.model.support import unsupported
from shardtune.model.tensor_parallel import require_separable
from shardtune.model.traits import has_experts, layer_types
from shardtune.planner.simulation.simulate import fake_world

_SECONDS = 120  # for an architecture
_MOST_PARAMETERS = 30_000_000
_CPU = torch.device("cpu")


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=[], help="architectures to do again")


def main(options: Namespace) -> None:
    kinds = options.only or architectures()
    rows = {} if not options.only else json.loads(RESULTS.read_text("utf-8"))
    quiet_libraries(is_main=False)
    torch.set_num_threads(1)
    with ThreadPoolExecutor(2) as pool:
        for kind, row in zip(kinds, pool.map(in_own_process, kinds), strict=True):
            rows[kind] = row
            print(kind, json.dumps(row), flush=True)
    ordered = {kind: rows[kind] for kind in architectures()}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    write_page()


def architectures() -> list[str]:
    """Return the types of models that transformers opens for text, alone or within a larger one."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})


def in_own_process(kind: str) -> Row:
    """Look at an architecture in a fork: all modules are loaded there already."""
    child = Child("its process", _send_row, kind)
    (row,) = results([child], _SECONDS, lambda _: f"takes more than {_SECONDS} s")
    return {"not built": row["problems"][0]} if "problems" in row else row


def _send_row(pipe: Pipe, kind: str) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    pipe.send(look_at(kind))


def look_at(kind: str) -> Row:
    """Return what an architecture can do, or why no tiny model of it could be built."""
    if refused := not_trained(kind):
        return {"refused": refused}
    try:
        model_config = tiny_config(kind)
        if model_config.is_encoder_decoder:
            return {"not causal": "a decoder made for an encoder"}
        with torch.device("meta"):
            parameters = build_with_towers(copy.deepcopy(model_config)).num_parameters()
        if parameters > _MOST_PARAMETERS:
            return {"not built": f"{parameters:,} parameters with all widths small"}
        torch.manual_seed(0)
        model = build_with_towers(copy.deepcopy(model_config), dtype=torch.float32)
    except UserError as error:
        return {"refused": str(error)}
    except Exception as error:  # each architecture checks its settings in its own way
        return {"not built": f"{type(error).__name__}: {first_line(error)}"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
            model.config.use_cache = model.config.get_text_config().use_cache = False
            with torch.no_grad():
                model(input_ids=torch.arange(3, 15).view(1, -1))
        except Exception as error:
            refused = problem_of(lambda: _require_trainable(_config(Path(folder))))
            if refused:
                return {"refused": refused}
            return {"not built": f"{type(error).__name__}: {first_line(error)}"}
        try:
            return _row(model, Path(folder))
        except Exception as error:
            return {"fails": f"{type(error).__name__}: {first_line(error)}"}


def _row(model: PreTrainedModel, folder: Path) -> Row:
    config = _config(folder)
    if refused := problem_of(lambda: _require_trainable(config)):
        return {"refused": refused}
    if refused := problem_of(lambda: _require_same_names(folder)):
        return {"refused": refused}
    drop_towers(model)
    model_config = read_model_config(config.model, config.data.max_length)
    if not is_causal(model):
        refused = problem_of(lambda: require_documents_apart(Layout.of(config), model_config))
        return {"refused": refused} if refused else {"fails": "its tokens see those behind them"}
    row: Row = {"layers": kinds_of_layers(model.config.get_text_config())}
    unsupported_packed = problem_of(lambda: _require_packable(model, config))
    row["cannot pack"] = (
        unsupported_packed
        or problem_of(lambda: require_documents_apart(Layout.of(config), model_config))
        or ""
    )
    row |= _trained(model, config, row["cannot pack"])
    row["mfu"] = problem_of(lambda: count_flops(model)) or "yes"
    row["experts"] = has_experts(model)
    spread, lora = _config(folder, "parallel.expert=2"), _config(folder, "lora.rank=4")
    row["spread"] = problem_of(lambda: _require_trainable(spread, ranks=2)) or "yes"
    row["lora"] = problem_of(lambda: choose_targets(model, lora.lora)) or "yes"
    shared = _config(folder, "parallel.context=2")
    not_shared = problem_of(lambda: _require_trainable(shared, ranks=2))
    not_shared = not_shared or problem_of(
        lambda: require_documents_apart(Layout.of(shared), model_config)
    )
    if row["rows"] != "flat":  # where no small copy can be made, the loaded weights show it
        not_shared = not_shared or f"each attention layer is called alone ({row['attention']})"
    row["context"] = not_shared or "yes"
    row["tensor"] = problem_of(lambda: _require_cut(folder, model_config)) or "yes"
    stages = _config(folder, "parallel.stages=2", "train.gradient_accumulation_steps=2")
    not_cut = problem_of(lambda: _require_trainable(stages, ranks=2))
    row["stages"] = (
        not_cut or problem_of(lambda: require_composable(Layout.of(stages), model_config)) or "yes"
    )
    return row


def _require_cut(folder: Path, model_config: PreTrainedConfig) -> None:
    cut = _config(folder, "parallel.tensor=2")
    _require_trainable(cut, ranks=2)
    require_documents_apart(Layout.of(cut), model_config)
    require_separable(Layout.of(cut), model_config)


def _config(folder: Path, *assignments: str) -> Config:
    given = [f"model.path={folder}", "data.max_length=128", "model.compute_dtype=float32"]
    return load_config(REPOSITORY / "examples/demo.yaml", [*given, *assignments], {})


def problem_of(work: Callable[[], Any]) -> str | None:
    """Return the text of a refusal or of another error, or None."""
    try:
        work()
    except (UserError, NotCounted) as error:
        return str(error)
    except Exception as error:
        return f"ends with {type(error).__name__}: {first_line(error)}"
    return None


def _require_trainable(config: Config, ranks: int = 1) -> None:
    model_config = read_model_config(config.model, config.data.max_length)
    with fake_world(Layout.of(config, ranks), ranks) as world:
        require_trainable(_unpacked(config), model_config, world)


def _require_packable(model: PreTrainedModel, config: Config) -> None:
    if problems := list(unsupported(model, Layout.of(config))):
        raise UserError(*problems)


def _unpacked(config: Config) -> Config:
    """Return the configuration without packing. `_require_packable` looks at packing."""
    return config.model_copy(update={"data": config.data.model_copy(update={"packing": False})})


def _require_same_names(folder: Path) -> None:
    assets = model_assets(folder) | {SOURCE: json.dumps(list_source(str(folder))).encode()}
    with torch.device("meta"):
        model = build_with_towers(read_model_config(_config(folder).model, 128))
    drop_towers(model)
    WholeModel(model_kinds(model), model.all_tied_weights_keys, "source", assets, None)


def kinds_of_layers(text: PreTrainedConfig) -> list[str]:
    return list(dict.fromkeys(layer_types(text)))


@torch.no_grad()
def is_causal(model: PreTrainedModel) -> bool:
    """Return whether another last token leaves the logits of the tokens before it as they are."""
    ids = torch.arange(3, 15).view(1, -1)
    other = ids.clone()
    other[0, -1] += 50
    a, b = (model.eval()(input_ids=row).logits[0, :-1] for row in (ids, other))
    return bool(torch.allclose(a, b, rtol=1e-4, atol=1e-5 * a.std().item()))


def _trained(model: PreTrainedModel, config: Config, cannot_pack: str) -> Row:
    """Return the kind of rows, and how far loss and gradients are from a loop over documents."""
    model.train()
    row, trained = some_documents()
    expected = one_by_one(model, row, trained)
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    if cannot_pack:
        config = _unpacked(config)
    trial = LogitsTrial(model, Layout.of(config), _CPU)
    attention = decide_attention(trial, config.data.max_length)
    use_loss_head(model, _CPU)
    batch = batch_of(row, trained, attention.is_flat)
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
    return {
        "rows": rows_of(attention),
        "attention": attention.text,
        "loss off": abs(loss.item() / expected.item() - 1),
        "gradients off": off / norm if norm else 0.0,
    }


def rows_of(attention: Attention) -> str:
    if not attention.is_flat:
        return "padded"
    if attention.by_layer:
        return "by layer"
    return "flat" if attention.by_document else "under a mask"


def some_documents() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    source = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, VOCABULARY - 20, (n,), generator=source) for n in LENGTHS]
    trained = [torch.rand(n, generator=source) < 0.4 for n in LENGTHS]
    return documents, trained


def one_by_one(
    model: PreTrainedModel, documents: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the summed loss of all logits, each document in a forward of its own."""
    total = torch.zeros(())
    for ids, flags in zip(documents, trained, strict=True):
        logits = model(input_ids=ids.view(1, -1)).logits[0].float()
        losses = -logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total = total + losses[flags[1:]].sum()
    return total
