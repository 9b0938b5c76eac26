"""Export adapters: in peft's format, and merged with the source's weights.

peft 0.21 changes `target_modules` of models with stacked experts: it also takes the router, and no
dense MLP. It takes the names in `target_parameters` as they are.
https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from shardtune.checkpoint.assets import SOURCE
from shardtune.checkpoint.export.model_files import (
    Export,
    Kind,
    Unit,
    WholeModel,
    files_with,
    in_dtype,
    on_meta,
)
from shardtune.checkpoint.train_state import MODEL, model_kinds
from shardtune.config import LoraConfig
from shardtune.model.lora import (
    End,
    Target,
    choose_targets,
    delta,
    trained_ends,
    trained_rows,
    weights_of_layers,
)
from shardtune.model.moe.grouped_experts import trait
from shardtune.model.parts import ROWS, is_stack
from shardtune.model.source.files import model_folder
from shardtune.model.source.text_model import drop_towers
from shardtune.model.source.weight_files import ADAPTER_CONFIG, weights_digest

_ROWS_IN_PEFT = "token_adapter.trainable_tokens_delta"


class Adapter(Export):
    """All that trained, in float32, as `PeftModel.from_pretrained` opens it.

    `stored` has dtype and shape of each stored tensor.
    """

    library = "peft"

    def __init__(
        self, stored: Mapping[str, Kind], lora: LoraConfig, assets: Mapping[str, bytes]
    ) -> None:
        self._dtype = "float32"
        model = on_meta(assets["config.json"])
        targets = choose_targets(model, lora)
        source = json.loads(assets[SOURCE])["path"] if SOURCE in assets else None
        config = _peft_config(model, targets, lora, source) | _peft_ends(model, lora)
        # The tokens and the template of training. A config.json would make this a whole model.
        beside = {n: assets[n] for n in assets if n not in (SOURCE, "config.json")}
        self._assets = beside | {ADAPTER_CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
        stacks: dict[str, list[str]] = {}
        for target in targets:
            stacks.setdefault(target.module, []).append(target.parameter)
        units = []
        for target in targets:
            of_module = stacks[target.module]
            # peft wraps a module once for each of its stacks; the first one is the innermost.
            depth = len(of_module) - 1 - of_module.index(target.parameter)
            path = f"base_model.model.{target.module}{'.base_layer' * depth}"
            for factor, name in zip("AB", target.factors, strict=True):
                dtype, shape = stored[f"{MODEL}{name}"]
                exported = f"{path}.lora_{factor}.weight"
                kind = (dtype, list(_to_peft(torch.empty(shape, device="meta"), name).shape))
                units.append(Unit([f"{MODEL}{name}"], {exported: kind}, {exported: exported}))
        for name in (end.trained for end in _ends(model, lora)):
            dtype, shape = stored[f"{MODEL}{name}"]
            # peft reads the weight of a whole embedding once more for a head that is tied to it.
            tied = [other for other, kept in model.all_tied_weights_keys.items() if kept == name]
            in_peft = (each.replace(ROWS, _ROWS_IN_PEFT) for each in (name, *tied))
            kinds = {f"base_model.model.{each}": (dtype, list(shape)) for each in in_peft}
            units.append(Unit([f"{MODEL}{name}"], kinds, {each: each for each in kinds}))
        self._files = {"adapter_model.safetensors": units}

    def _convert(self, unit: Unit, read: Callable[[str], torch.Tensor]) -> Iterator[torch.Tensor]:
        (name,) = unit.stored
        tensor = _to_peft(read(name), name)
        yield from (tensor for _ in unit.exported)


def _ends(model: PreTrainedModel, lora: LoraConfig) -> list[End]:
    """Return what trains of the embedding and the head; of tied ones the first alone."""
    return trained_ends(model, lora)[: 1 if model.all_tied_weights_keys else 2]


def _peft_ends(model: PreTrainedModel, lora: LoraConfig) -> dict[str, Any]:
    ends, ids = _ends(model, lora), trained_rows(model, lora)
    return {
        "modules_to_save": [end.module for end in ends if end.is_whole] or None,
        "trainable_token_indices": {end.module: ids for end in ends if not end.is_whole} or None,
        "ensure_weight_tying": bool(model.all_tied_weights_keys and lora.whole),
    }


def _to_peft(factor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a factor in peft's layout: stacked experts have A (E rank, in) and B (out, rank E)."""
    if not is_stack(factor):
        return factor
    return factor.flatten(0, 1) if name.endswith("A") else factor.permute(1, 2, 0).flatten(1)


def _peft_config(
    model: PreTrainedModel, targets: list[Target], lora: LoraConfig, source: str | None
) -> dict[str, Any]:
    has_stacks = any(target.is_stack for target in weights_of_layers(model))
    as_modules = [t for t in targets if t.group == "attention" or not has_stacks]
    as_parameters = [t for t in targets if t not in as_modules]
    modules = _shortest({t.module for t in as_modules}, [name for name, _ in model.named_modules()])
    parameters = _shortest(
        {target.weight for target in as_parameters}, [name for name, _ in model.named_parameters()]
    )
    assert lora.rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.scaled_by,
        "use_rslora": lora.rslora,
        # peft has no dropout for parameters, and inference has none at all.
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": modules,
        "target_parameters": parameters or None,
    }


def _shortest(chosen: Collection[str], names: Collection[str]) -> list[str]:
    """Return the shortest suffixes of dotted names that match no name but the chosen ones."""
    others = [f".{name}" for name in names if name not in chosen]
    ends: dict[str, bool] = {}

    def is_exact(end: str) -> bool:
        if end not in ends:
            ends[end] = not any(other.endswith(f".{end}") for other in others)
        return ends[end]

    shortest = set()
    for name in chosen:
        parts = name.split(".")
        all_ends = (".".join(parts[i:]) for i in reversed(range(len(parts))))
        shortest.add(next(filter(is_exact, all_ends), name))
    return sorted(shortest)


class MergedModel(WholeModel):
    """The source's model with all that trained beside its weights, in float32, unit by unit."""

    def __init__(
        self, lora: LoraConfig, dtype: str, assets: Mapping[str, bytes], folder: Path
    ) -> None:
        model = on_meta(assets["config.json"])
        drop_towers(model)
        tied = model.all_tied_weights_keys
        super().__init__(model_kinds(model), tied, dtype, assets, folder)
        self._source_files = files_with(json.loads(assets[SOURCE])["tensors"], folder)
        self._scaling = lora.scaling
        self._targets = {f"{MODEL}{t.weight}": t for t in choose_targets(model, lora)}
        self._rows = trained_rows(model, lora)
        self._ends = {f"{MODEL}{end.module}.weight": end for end in _ends(model, lora)}

    @property
    def stored(self) -> list[str]:
        names = list[str]()
        for name in super().stored:
            if name in self._targets:
                names += [f"{MODEL}{factor}" for factor in self._targets[name].factors]
            if name in self._ends:
                names.append(f"{MODEL}{self._ends[name].trained}")
        return names

    def _convert(self, unit: Unit, read: Callable[[str], torch.Tensor]) -> Iterator[torch.Tensor]:
        if end := self._ends.get("".join(unit.stored)):
            values = weight = read(f"{MODEL}{end.trained}")
            for name, (dtype, _) in unit.exported.items():
                if not end.is_whole:
                    weight = self._read_source(name)[name].float()
                    weight[self._rows] = values
                yield in_dtype(name, weight, dtype)
            return
        added: dict[str, torch.Tensor] = {}
        if any(name in self._targets for name in unit.stored):
            added = revert_weight_conversion(
                self._model,
                {name.removeprefix(MODEL): self._delta(name, read) for name in unit.stored},
            )
        for name, (dtype, _) in unit.exported.items():
            weight = self._read_source(name)[name]
            if added:
                weight = weight.float() + added.pop(unit.converted[name])
            yield in_dtype(name, weight, dtype)

    def _delta(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return what a merge adds to a weight: the product of its factors."""
        target = self._targets.get(name)
        if target is None:
            weight = self._model.get_parameter_or_buffer(name.removeprefix(MODEL))
            return torch.zeros(weight.shape)
        a, b = (read(f"{MODEL}{factor}") for factor in target.factors)
        module: Any = self._model.get_submodule(target.module)
        return delta(a, b, self._scaling, target.is_stack and trait(module, "is_transposed"))


def why_not_merged(assets: Mapping[str, bytes]) -> str:
    """Return why factors cannot be merged on this node, or ""."""
    if SOURCE not in assets:
        return "the frozen weights were drawn at random (model.init=random) and are in no file"
    source = json.loads(assets[SOURCE])
    if files_with(source["tensors"], model_folder(source["path"])):
        return ""
    return f"the files of {source['path']} are not there now, or have other tensors"


def why_other_weights(assets: Mapping[str, bytes]) -> str:
    """Read the source's weights; return why they are not the weights of the run, or ""."""
    source = json.loads(assets[SOURCE])
    folder, trained_on = model_folder(source["path"]), source.get("weights")
    # Older checkpoints lack the digest of the weights.
    if folder is None or trained_on in (None, digest := weights_digest(folder)):
        return ""
    return (
        f"the digest of the weights in {source['path']} is {digest}, and was {trained_on} when the "
        "adapters were trained"
    )
