"""Run a step of the real model on fake tensors, as one rank of any world, and measure it.

The model is cut to a few layers, and what is measured is extrapolated: each part of a step grows by
the same bytes with each further period of layers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.config import Config
from shardtune.data.batch import Batch
from shardtune.distributed.join import build_meshes, mesh_problems
from shardtune.distributed.progress import Progress
from shardtune.distributed.tensors import to_local
from shardtune.distributed.world import World
from shardtune.errors import UserError
from shardtune.model.attention import DOCUMENT_ATTENTION, UnexpectedFeature
from shardtune.model.build import build_on_meta, forward_only
from shardtune.model.loss import summed_loss, use_loss_head
from shardtune.model.support import decoder_layers
from shardtune.planner.tracker import Cause, Collective, Peak, Tracker
from shardtune.training.reshard import ReshardPolicy

# A cut model has at least so many layers: neighbours in the middle of a large one prefetch alike.
_FEWEST_LAYERS = 4


@dataclass(frozen=True)
class Measured:
    """What one rank holds and sends in a step of `layers` layers.

    `peaks`: by phase and place. A layer's place is its number, from the end if it is negative.
    `traffic`: of the evaluation's forward, and of each micro-batch.
    """

    layers: int
    peaks: dict[tuple[str, int], Peak]
    traffic: list[Counter[Collective]]


def layer_kinds(model: PreTrainedModel) -> list[Hashable]:
    """Return a value for each decoder layer; layers that are built alike have the same."""
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    kinds: list[Hashable] = []
    for i, layer in enumerate(decoder_layers(model)):
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        kinds.append((types[i] if i < len(types) else None, shapes))
    return kinds


def cuts(kinds: Sequence[Hashable]) -> tuple[int, int] | None:
    """Return two numbers of layers to measure, between which lies one period of the kinds.

    Both cut models begin as the whole one does and end as it does, at the end of a period. Returns
    None if the whole model has as few layers as they have, or has no period.
    """
    n = len(kinds)
    for period in range(1, n // 2 + 1):
        # The last layers repeat with this period, from `start` on.
        start = n
        while start > 0 and (start + period > n or kinds[start - 1] == kinds[start - 1 + period]):
            start -= 1
        first = n - (n - start) // period * period
        while first < _FEWEST_LAYERS:
            first += period
        # The layers must repeat three times: two alike may be chance.
        if (n - start) // period >= 3 and first + period < n:
            return first, first + period
    return None


@contextmanager
def fake_world(nodes: int, ranks_per_node: int, config: Config) -> Iterator[World]:
    """Be rank 0, the fullest, of a world without other processes, whose collectives do nothing.

    Raises:
        UserError: the ranks cannot be divided as configured.
    """
    size, device = nodes * ranks_per_node, torch.device("cpu")
    if problems := list(mesh_problems(size, config.parallel)):
        raise UserError(*problems)
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=size)
    try:
        mesh, expert_mesh = build_meshes(device, size, config.parallel)
        progress = Progress(device)
        yield World(0, size, 0, ranks_per_node, 0, device, mesh, store, progress, expert_mesh)
    finally:
        dist.destroy_process_group()


def with_layers(model_config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Return the configuration of the model's first layers alone."""
    cut = copy.deepcopy(model_config)
    text = cut.get_text_config()
    whole = text.num_hidden_layers
    text.num_hidden_layers = layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == whole:
            setattr(text, name, value[:layers])
    return cut


def simulate(
    config: Config, model_config: PreTrainedConfig, policy: ReshardPolicy, world: World
) -> Measured:
    """Evaluate and take a step of up to three micro-batches as this rank. Rows are full.

    The second one finds the gradients of the first, and of all further ones only the last differs.

    Raises:
        UserError: the model's attention or experts cannot be run on fake tensors.
    """
    tracker, device = Tracker(), world.device
    model = build_on_meta(config, model_config, world)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device=device)
        model.tie_weights()
        batch = _full_batch(config, device)
        for tensor in (*model.parameters(), *model.buffers()):
            tracker.hold(to_local(tensor), Cause.PARAMETERS)
        with tracker.following():
            tracker.read_by_host = _balanced_pairs(8, model, config)
            _prepare(model, config, device)
            if policy.keep_parameters:
                cast(Any, model).set_reshard_after_forward(False)
            _watch_layers(model, tracker)
            tracker.read_by_host = _balanced_pairs(batch.input_ids.numel(), model, config)
            tracker.traffic = [Counter()]
            tracker.begin("evaluate")
            with forward_only(model):
                summed_loss(model, batch)
            micro_batches = min(3, config.train.gradient_accumulation_steps)
            for number in range(micro_batches):
                tracker.traffic.append(Counter())
                policy.before_forward(model, is_last_micro_batch=number + 1 == micro_batches)
                tracker.begin("forward")
                loss = summed_loss(model, batch)
                tracker.begin("backward", Cause.BACKWARD)
                loss.backward()
                del loss
    return Measured(len(decoder_layers(model)), tracker.peaks, tracker.traffic)


def _full_batch(config: Config, device: torch.device) -> Batch:
    """Return rows of one document each, as long as the row, of which every token is trained."""
    rows, length = config.train.micro_batch_size, config.data.max_length
    numbers = partial(torch.zeros, dtype=torch.int64, device=device)
    boundaries = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    trained = rows * (length - 1)
    return Batch(
        numbers(1, rows * length),
        numbers(1, rows * length),
        None,
        numbers(trained),
        numbers(trained),
        [length] * rows,
        boundaries,
    )


def _prepare(model: PreTrainedModel, config: Config, device: torch.device) -> None:
    """Choose attention and head as a run does, but without a look at numbers.

    Raises:
        UserError: the run would attend under a mask, or multiply experts in float32.
    """
    has_stacks = any(parameter.dim() == 3 for parameter in model.parameters())
    if has_stacks and config.model.compute_dtype == "float32":
        raise UserError(
            "the plan of a model with experts needs model.compute_dtype=bfloat16 - use that"
        )
    model.set_attn_implementation(DOCUMENT_ATTENTION)
    try:
        use_loss_head(model, device)
    except UnexpectedFeature as error:
        raise UserError(
            f"{model.config.model_type} has {error.feature}, whose memory is not planned yet - "
            "start the run to see"
        ) from error


def _balanced_pairs(tokens: int, model: PreTrainedModel, config: Config) -> Iterator[int]:
    """Yield how many (token, expert) pairs go to each rank of the experts, and come back.

    As many as to the others, or one more.
    """
    top_k = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    ranks, pairs = config.parallel.expert, tokens * top_k
    return cycle([pairs // ranks + (rank < pairs % ranks) for rank in range(ranks)])


def _watch_layers(model: PreTrainedModel, tracker: Tracker) -> None:
    """Name the places of a step, so that those of models of several depths can be compared."""
    layers = decoder_layers(model)

    def enter(place: int, *_: Any) -> None:
        tracker.enter(place)

    def leave(place: int, module: nn.Module, arguments: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(partial(enter, place))

    for i, layer in enumerate(layers):
        place = i if i < len(layers) // 2 else i - len(layers)
        layer.register_forward_pre_hook(partial(enter, place), prepend=True)
        layer.register_forward_hook(partial(leave, place))
