"""Low-rank adapters (LoRA, arXiv 2106.09685): frozen weights with trained factors beside them.

    y = W x + scaling * B A dropout(x)      A (rank, in), B (out, rank)

The factors are parameters of the module that has the weight. So the weight keeps its name, and FSDP
gathers both in one group. Stacked experts have a pair of factors for each expert, and no merged
copy of a stack ever exists.
"""

import difflib
import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import _grouped_linear

from shardtune.config import LoraConfig
from shardtune.distributed.tensors import copy_slice, dtype_name
from shardtune.errors import UserError
from shardtune.model.loss import HeadWithRows
from shardtune.model.moe.grouped_experts import (
    are_stacked,
    gathering_forward,
    stack_product,
    trait,
)
from shardtune.model.parts import FACTORS, ROWS, decoder_layers, is_factor, is_in_list, is_stack
from shardtune.new_tokens import NewTokens

_GROUPS = ("attention", "experts")  # the names that `lora.targets` may have
_ROUTERS = {"gate", "router", "router_gate", "shared_expert_gate"}


class LoraLinear(nn.Linear):
    """A linear layer with the factors `lora_A` (rank, in) and `lora_B` (out, rank)."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_dropout: float
    lora_scaling: float

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        dropped = F.dropout(hidden, self.lora_dropout, self.training)
        adapted = F.linear(F.linear(dropped, self.lora_A), self.lora_B)
        return super().forward(hidden) + adapted * self.lora_scaling


class LoraExperts(nn.Module):
    """Adds factors to stacked experts of transformers, as a base class beside their own class."""

    # A stack `down_proj` has `down_proj_lora_A` (experts, rank, in) and `down_proj_lora_B`
    # (experts, out, rank).

    lora_dropout: float
    lora_scaling: float

    forward = gathering_forward

    def product(
        self, name: str, rows: torch.Tensor, expert_ids: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Multiply rows (rows, in), sorted by expert, by one stack and its factors: (rows, out)."""
        output = stack_product(self, name, rows, expert_ids, ends)
        if not hasattr(self, f"{name}_lora_A"):
            return output
        a, b = (getattr(self, f"{name}_{factor}") for factor in FACTORS)
        # Grouped products need rows of a multiple of 16 bytes.
        padding = -a.shape[1] % (16 // a.itemsize)
        a, b = F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))
        dropped = F.dropout(rows, self.lora_dropout, self.training)
        adapted = _grouped_linear(_grouped_linear(dropped, a, ends), b, ends)
        return output + adapted * self.lora_scaling


class EmbeddingRows(nn.Module):
    """Takes the rows `runs` of an embedding from `token_rows`, as a base class beside its own."""

    token_rows: nn.Parameter  # (rows of all runs, width); they train while the weight is frozen
    runs: Sequence[slice]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        looked_up, before, places = super().forward(ids), 0, torch.full_like(ids, -1)
        for run in self.runs:
            is_in = (ids >= run.start) & (ids < run.stop)
            places = torch.where(is_in, ids - run.start + before, places)
            before += run.stop - run.start
        # The class's own forward may scale the rows that it looks up.
        own: Any = self
        weight, padding = own._parameters["weight"], own.padding_idx
        own._parameters["weight"], own.padding_idx = self.token_rows, None
        try:
            trained = super().forward(places.clamp(min=0))
        finally:
            own._parameters["weight"], own.padding_idx = weight, padding
        return torch.where((places >= 0).unsqueeze(-1), trained, looked_up)


@dataclass(frozen=True)
class Target:
    """A weight of a decoder layer that a name of `lora.targets` may mean."""

    module: str  # its full name
    parameter: str  # `weight`, or the name of a stack of experts
    group: str  # attention, experts, router or other
    in_layer: str  # the name in each layer, without `.weight`
    kind: type[nn.Module]

    @property
    def weight(self) -> str:
        return f"{self.module}.{self.parameter}"

    @property
    def is_stack(self) -> bool:
        return self.group != "router" and not issubclass(self.kind, nn.Linear)

    @property
    def is_supported(self) -> bool:
        """Whether adapters know how its layer computes."""
        if self.is_stack:
            return are_stacked(self.kind)
        return self.group == "router" or self.kind in (nn.Linear, LoraLinear)

    @property
    def factors(self) -> tuple[str, str]:
        """Return the full names of A and B."""
        prefix = f"{self.weight}_" if self.is_stack else f"{self.module}."
        a, b = FACTORS
        return f"{prefix}{a}", f"{prefix}{b}"

    @property
    def name(self) -> str:
        return self.weight.removesuffix(".weight")

    def is_meant(self, name: str) -> bool:
        """Whether a name of `lora.targets` means this weight."""
        if name == "all-linear":
            return self.group != "router"
        if name in _GROUPS and name == self.group:
            return True
        return f".{self.name}".endswith(f".{name}")


def weights_of_layers(model: PreTrainedModel) -> Iterator[Target]:
    layers = set(decoder_layers(model))
    # No text reaches the layers of a tower for images. `get_decoder` of ModernBERT returns its
    # head, which has no layers: there all layers count.
    layers = layers & set(model.get_decoder().modules()) or layers
    for layer_name, layer in model.named_modules():
        if layer not in layers:
            continue
        modules = dict(layer.named_modules())
        for name, module in modules.items():
            names = name.split(".")  # for `a.b.c`, the modules `a`, `a.b` and `a.b.c`
            above = [modules[".".join(names[: i + 1])] for i in range(len(names))]
            in_layer = re.sub(r"\.\d+\.", ".N.", f".{name}")[1:]
            parts, full_name = set(names), f"{layer_name}.{name}"
            classes = "".join(type(each).__name__ for each in above)
            is_of_expert = re.search("expert", name + classes, re.I)
            if "router" not in parts and re.search(r"attn|attention", name):
                group = "attention"
            elif parts & _ROUTERS or any("Router" in type(each).__name__ for each in above):
                group = "router"
            else:
                group = "experts" if is_in_list(name) else "other"
            if isinstance(module, nn.Linear) or (group == "router" and hasattr(module, "weight")):
                yield Target(full_name, "weight", group, in_layer, type(module))
            elif is_of_expert:
                for stack, parameter in module.named_parameters(recurse=False):
                    if is_stack(parameter) and not is_factor(stack):
                        path = f"{in_layer}.{stack}"
                        yield Target(full_name, stack, "experts", path, type(module))


def choose_targets(model: PreTrainedModel, config: LoraConfig) -> list[Target]:
    """Return the weights that get adapters.

    Raises:
        UserError: a name means no weight, a router, or a layer that adapters do not support.
    """
    names = (config.targets,) if isinstance(config.targets, str) else config.targets
    weights, kind = list(weights_of_layers(model)), model.config.model_type
    # All names are checked before the refusal, which then has every problem.
    problems, chosen = [], dict[str, Target]()
    for name in names:
        meant = [target for target in weights if target.is_meant(name)]
        if routers := [target.name for target in meant if target.group == "router"]:
            problems.append(
                f"lora.targets: {name} means the router of the experts ({routers[0]}) of {kind} - "
                "leave it out, or write the names of other layers in full"
            )
        elif unsupported := [target for target in meant if not target.is_supported]:
            first = min(unsupported, key=lambda target: target.kind.__name__)
            what = "the experts" if first.is_stack else first.in_layer
            problems.append(
                f"lora.targets: {name} means {what} of {kind}, and adapters do not support such "
                f"layers ({first.kind.__name__}) - {_usable(name, weights)}"
            )
        elif not meant:
            problems.append(
                f"lora.targets: {name} means no layer of {kind} - {_usable(name, weights)}"
            )
        chosen |= {target.weight: target for target in meant}
    if problems:
        raise UserError(*problems)
    return list(chosen.values())


def _usable(name: str, weights: list[Target]) -> str:
    """Return a remedy: the names that are nearest to one that is refused, or a few others."""
    usable = [t for t in weights if t.group != "router" and t.is_supported]
    odd = {target.group for target in weights if not target.is_supported}
    groups = [group for group in _GROUPS if group in {t.group for t in usable} - odd]
    paths = [target.in_layer for target in usable]
    last = [path.rpartition(".")[2] for path in paths]
    known = [*dict.fromkeys([*(() if odd else ("all-linear",)), *groups, *last, *paths])]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5) or known[:12]
    several = f" (several are a list, [{','.join(near[:2])}])" * ("," in name)
    return f"use {', '.join(near)}{several}" if usable else "set lora.rank=null"


def add_adapters(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freeze a model on meta, and give the chosen weights factors in float32. Raises UserError."""
    assert config.rank
    model.requires_grad_(False)
    for target in choose_targets(model, config):
        module: Any = model.get_submodule(target.module)
        weight = getattr(module, target.parameter)
        if target.is_stack:
            out, in_ = weight.shape[1:]
            if trait(module, "is_transposed"):
                out, in_ = in_, out
            prefix, stack = f"{target.parameter}_", weight.shape[:1]
            if not isinstance(module, LoraExperts):
                cast(Any, module).__class__ = _with_factors(cast(Any, target.kind))
        else:
            (out, in_), prefix, stack = weight.shape, "", weight.shape[:0]
            module.__class__ = LoraLinear
        for factor, shape in zip(FACTORS, ((config.rank, in_), (out, config.rank)), strict=True):
            empty = torch.empty(*stack, *shape, dtype=torch.float32, device=weight.device)
            module.register_parameter(f"{prefix}{factor}", nn.Parameter(empty))
        module.lora_dropout, module.lora_scaling = config.dropout, config.scaling
    _train_ends(model, config)


@functools.cache
def _with_factors(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Lora{kind.__name__}", (LoraExperts, kind), {})


@functools.cache
def _with_rows(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{kind.__name__}WithRows", (EmbeddingRows, kind), {})


class End(NamedTuple):
    """The embedding or the head, where it trains beside the factors, whole or rows of it."""

    module: str  # its full name
    is_whole: bool

    @property
    def trained(self) -> str:
        """The name of the tensor that trains."""
        return f"{self.module}.{'weight' if self.is_whole else ROWS}"


def trained_rows(model: PreTrainedModel, config: LoraConfig) -> list[int]:
    """Return the ids of the tokens whose rows train, where their embedding or head is frozen."""
    return sorted(NewTokens.of(model.config).pieces) if config.rows == "new" else []


def trained_ends(model: PreTrainedModel, config: LoraConfig) -> list[End]:
    """Return what trains of the embedding and the head. A tied weight is that of both."""
    names = {module: name for name, module in model.named_modules()}
    whole = {*config.whole}
    if whole and model.all_tied_weights_keys:
        whole = {"embed_tokens", "lm_head"}
    ends = [
        End(names[module], key in whole)
        for key, module in (
            ("embed_tokens", model.get_input_embeddings()),
            ("lm_head", model.get_output_embeddings()),
        )
    ]
    return [end for end in ends if end.is_whole or trained_rows(model, config)]


def _train_ends(model: PreTrainedModel, config: LoraConfig) -> None:
    """Let the whole embedding and head of `lora.whole` train, and rows of the others."""
    ids, tied = trained_rows(model, config), model.all_tied_weights_keys
    for end in trained_ends(model, config):
        module: Any = model.get_submodule(end.module)
        weight = module.weight
        kind: Any = type(module)
        if getattr(module, "bias", None) is not None:
            raise UserError(
                f"lora: {end.module} of {model.config.model_type} has a bias, and peft carries "
                "none beside its rows - set lora.rows=none and lora.whole=[]"
            )
        if end.is_whole:
            weight.requires_grad_()
            weight.data = weight.data.float()
            continue
        if kind is not nn.Linear and not issubclass(kind, nn.Embedding):
            raise UserError(
                f"lora.rows: {end.module} of {model.config.model_type} is a {kind.__name__}, of "
                "which no row can train alone - set lora.rows=none"
            )
        empty = torch.empty(len(ids), weight.shape[1], dtype=torch.float32, device=weight.device)
        module.register_parameter(ROWS, nn.Parameter(empty))
        module.runs = runs_of(ids)
        module.__class__ = HeadWithRows if kind is nn.Linear else _with_rows(kind)
    names = {name for name, _ in model.named_parameters() if name.endswith(ROWS)}
    for other, kept in list(tied.items()):
        own, shared = (name.removesuffix("weight") + ROWS for name in (other, kept))
        if {own, shared} <= names:
            tied[own] = shared
            model.get_submodule(own.rpartition(".")[0]).token_rows = model.get_parameter(shared)


def runs_of(ids: Sequence[int]) -> list[slice]:
    """Return sorted ids as runs of adjacent ones."""
    runs = list[slice]()
    for i in ids:
        start = runs.pop().start if runs and runs[-1].stop == i else i
        runs.append(slice(start, i + 1))
    return runs


@torch.no_grad()
def draw_factors(model: PreTrainedModel, seed: int) -> None:
    """Draw A from U(-1, 1) / sqrt(in), as peft and `nn.Linear` do, and set B to zero."""
    # Each factor is drawn whole from (seed, its name): it is the same on any number of ranks.
    for name, parameter in model.named_parameters():
        if not is_factor(name):
            continue
        whole = torch.zeros(parameter.shape)
        if name.endswith(FACTORS[0]):
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            bound = 1 / math.sqrt(parameter.shape[-1])
            whole.uniform_(-bound, bound, generator=generator)
        copy_slice(whole, parameter)


def delta(a: torch.Tensor, b: torch.Tensor, scaling: float, is_transposed: bool) -> torch.Tensor:
    """Return the product of the factors that is added to their weight, in float32."""
    product = torch.matmul(b.float(), a.float()).mul_(scaling)
    return product.transpose(-2, -1) if is_transposed else product


def describe_adapters(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return lines on the weights with adapters, and the numbers of trained and frozen ones."""
    parameters = list(model.named_parameters())
    trained = sum(p.numel() for _, p in parameters if p.requires_grad)
    frozen = Counter[str]()
    for _, parameter in parameters:
        if not parameter.requires_grad:
            frozen[dtype_name(parameter.dtype)] += parameter.numel()
    targets = choose_targets(model, config)
    counts = Counter(target.in_layer for target in targets)
    experts = "" if any(target.group == "experts" for target in targets) else "no "
    scaled = f"alpha {config.scaled_by:g}{' (rsLoRA)' * config.rslora}"
    rows = f"{len(trained_rows(model, config))} rows of "
    ends = [
        f"{'the whole ' if end.is_whole else rows}{end.module}"
        for end in trained_ends(model, config)
    ]
    return [
        f"LoRA: rank {config.rank}, {scaled}, {experts}experts among its modules: "
        + ", ".join(f"{n} x {name}" for name, n in counts.items()),
        *([f"LoRA: {' and '.join(ends)} train beside the factors"] if ends else []),
        f"LoRA: {trained:,} parameters are trained, in float32 with float32 AdamW; the others are "
        f"frozen: {', '.join(f'{n:,} in {dtype}' for dtype, n in frozen.items())}",
    ]
