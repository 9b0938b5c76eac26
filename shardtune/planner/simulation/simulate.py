"""Run a step of the real model on fake tensors, as one rank of any world, and measure it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedConfig, PreTrainedModel

from shardtune.config import Config
from shardtune.data.batch import Batch, slice_lengths
from shardtune.distributed.exchange import heads_between
from shardtune.distributed.layout import Layout
from shardtune.distributed.meshes import build_meshes
from shardtune.distributed.progress import Progress
from shardtune.distributed.tensors import to_local
from shardtune.distributed.world import World
from shardtune.errors import UserError
from shardtune.model.build import build_on_meta, run_as_on_gpus
from shardtune.model.documents.attention_choice import (
    TRIAL_LENGTHS,
    Attention,
    LogitsTrial,
    decide_attention,
    not_shared,
)
from shardtune.model.documents.one_by_one import (
    call_one_by_one,
    decays_by_head,
    restore,
    state_mixers,
)
from shardtune.model.facts.facts import ModelFacts
from shardtune.model.fsdp_groups import forward_only
from shardtune.model.loss import HEAD_TRIAL_TOKENS, use_loss_head
from shardtune.model.recomputation import tile_layers
from shardtune.model.stages import layers_in
from shardtune.planner.arithmetic.figures import EXPERT_IMBALANCE, Cause, Collective, Kernel, Peak
from shardtune.planner.simulation.tracker import Tracker
from shardtune.training.pipeline import Stage
from shardtune.training.states.host_states import SentGradients
from shardtune.training.states.replica_shards import OwnedParameters
from shardtune.training.states.reshard import ReshardPolicy

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """A step to simulate as one rank: a few micro-batches of full rows."""

    config: Config
    policy: ReshardPolicy
    world: World
    layers: range | None = None  # the layers of the rank's stage
    tiles: int = 1  # see `tile_layers`
    imbalance: float = EXPERT_IMBALANCE


@dataclass(frozen=True)
class Measured:
    """Memory, traffic and kernels of one rank in a step of `layers` layers.

    `peaks`: by phase and place. A layer's place is its index; in the second half of the layers, its
    negative index. `pools`: peak bytes by phase, place and stream. `traffic` and `kernels`: of the
    evaluation's forward, then of each micro-batch, and last of all that follows the micro-batches.
    """

    layers: int
    peaks: dict[tuple[str, int], Peak]
    pools: dict[tuple[str, int, int], int]
    traffic: list[Counter[Collective]]
    kernels: list[Counter[Kernel]]
    attention: Attention

    def step_traffic(self, micro_batches: int) -> Counter[Collective]:
        """Return the traffic of a step with this number of micro-batches."""
        total = _step(self.traffic, micro_batches)
        # A message may arrive one micro-batch early: take the mean over the micro-batches.
        for collective in [key for key in total if key.kind == "send"]:
            sizes = [micro_batch[collective] for micro_batch in self.traffic[1:-1]]
            behind = self.traffic[-1][collective]
            total[collective] = micro_batches * sum(sizes) // len(sizes) + behind
        return total

    def step_kernels(self, micro_batches: int) -> Counter[Kernel]:
        """Return how often each kernel runs in a step, without the optimizer's kernels."""
        return _step(self.kernels, micro_batches)


def _step(parts: Sequence[Counter[T]], micro_batches: int) -> Counter[T]:
    """Return the sum over a step: all micro-batches between first and last equal the second."""
    _, first, *others, behind = parts
    total = first + behind
    if others:
        total += others[-1]
    for key, size in others[0].items() if len(others) > 1 else ():
        total[key] += (micro_batches - 2) * size
    return total


@contextmanager
def fake_world(layout: Layout, ranks_per_node: int, stage: int = 0) -> Iterator[World]:
    """Be the first rank of a stage, the fullest, in a world whose collectives do nothing.

    Raises:
        UserError: the ranks cannot be divided as configured.
    """
    device = torch.device("cpu")
    if problems := layout.problems([rank // ranks_per_node for rank in range(layout.ranks)]):
        raise UserError(*problems)
    store, rank = FakeStore(), stage * layout.stage_ranks
    node, local_rank = divmod(rank, ranks_per_node)
    dist.init_process_group("fake", store=store, rank=rank, world_size=layout.ranks)
    try:
        meshes = build_meshes(device, layout)
        progress = Progress(device)
        world = World(
            rank, layout, local_rank, ranks_per_node, node, device, meshes, store, progress
        )
        yield world
    finally:
        dist.destroy_process_group()


def simulate(step: Step, model_config: PreTrainedConfig, facts: ModelFacts) -> Measured:
    """Simulate an evaluation, and a step of max(3, stages + 1) micro-batches or all, if fewer.

    The first micro-batch finds no gradients, the second does, and the last reduces gradients that
    were kept. Further micro-batches are like the second. A pipeline has `stages` of them in flight.

    `model_config`: that of the model of `facts`, or of its first layers alone.

    Raises:
        Exception: the model needs the contents of a tensor; each model raises its own class.
    """
    policy, world, layout = step.policy, step.world, step.world.layout
    tracker, device = Tracker(layout.is_gpu), world.device
    model = build_on_meta(step.config, model_config, facts, world, step.layers)
    layers = layers_in(model, facts.layer_names)
    if layout.is_gpu:
        run_as_on_gpus(model, layout, _OtherMemory)
    exchanged = partial(_exchanged, facts.top_k, step)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device=device)
        model.tie_weights(recompute_mapping=False)
        owned = OwnedParameters(model, world)
        for tensor in (*model.parameters(), *model.buffers()):
            tracker.hold(to_local(tensor), Cause.PARAMETERS)
        with tracker.following():
            attention = _decide(model, step, tracker, exchanged)
            if step.tiles > 1:
                tile_layers(model, layers, step.tiles)
            batch = full_batch(layout, attention.is_flat, device)
            shorten_rows(state_mixers(model))
            policy.keep_gathered(model)
            _watch_layers(layers, tracker)
            tracker.read_by_host = exchanged(batch.input_ids.numel(), step.tiles)
            tracker.restart()  # the trials are no part of a step
            stage = Stage(model, owned, world)
            sent = SentGradients(owned, _OtherMemory()) if layout.offloads else None
            tracker.begin("evaluate")
            with forward_only(model):
                stage.forward(batch)
            most = min(max(3, layout.stages + 1), layout.micro_batches)
            traffic, kernels = _accumulate([batch] * most, stage, model, policy, tracker)
            if sent:
                sent.finish()
            tracker.begin("optimizer", Cause.UPDATE)
            owned.gather()
    return Measured(len(layers), tracker.peaks, tracker.pools, traffic, kernels, attention)


def _decide(
    model: PreTrainedModel,
    step: Step,
    tracker: Tracker,
    exchanged: Callable[[int, int], Iterator[int]],
) -> Attention:
    """Choose the attention and the loss head by the same trials as a run."""
    tracker.read_by_host = exchanged(sum(TRIAL_LENGTHS), 1)
    world, layout = step.world, step.world.layout
    trial = LogitsTrial(model, layout, world.device, heads=heads_between(world), compares=False)
    attention = decide_attention(trial, layout.max_length)
    if problem := not_shared(attention, layout):
        raise UserError(problem)
    tracker.read_by_host = exchanged(HEAD_TRIAL_TOKENS, 1)
    if world.is_last_stage:
        use_loss_head(model, world.device, "cuda" if layout.is_gpu else "cpu")
    return attention


class _OtherMemory:
    """Stands for host memory: a copy in it takes nothing of the device."""

    def write(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        pass

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(to_local(parameter), dtype=parameter.grad_dtype)

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
        return tensor.shape, tensor.dtype

    def to_device(self, copy: tuple[torch.Size, torch.dtype]) -> torch.Tensor:
        shape, dtype = copy
        return torch.empty(shape, dtype=dtype)

    def wait(self) -> None:
        pass

    def drop(self, _: Any) -> None:
        pass


def _accumulate(
    micro_batches: list[Batch],
    stage: Stage,
    model: PreTrainedModel,
    policy: ReshardPolicy,
    tracker: Tracker,
) -> tuple[list[Counter[Collective]], list[Counter[Kernel]]]:
    """Run the micro-batches of a step; return `traffic` and `kernels` of `Measured`."""
    traffic = [tracker.traffic, *(Counter[Collective]() for _ in micro_batches)]
    kernels = [tracker.kernels, *(Counter[Kernel]() for _ in micro_batches)]
    tracker.traffic = traffic[1]  # a stage receives its first message before its first pass
    for newest, (batch, due) in enumerate(stage.passes(micro_batches)):
        tracker.traffic, tracker.kernels = traffic[1 + newest], kernels[1 + newest]
        tracker.begin("forward")
        stage.forward(batch)
        for oldest in due:
            tracker.traffic, tracker.kernels = traffic[1 + oldest], kernels[1 + oldest]
            policy.before_backward(model, oldest == len(micro_batches) - 1)
            tracker.begin("backward", Cause.BACKWARD)
            stage.backward(micro_batches[oldest], scale=1.0)
            for parameter in model.parameters():  # gradients without a reduction are uncounted
                if parameter.grad is not None:
                    tracker.hold(to_local(parameter.grad), Cause.GRADIENTS)
    tracker.traffic, tracker.kernels = Counter(), Counter()
    traffic.append(tracker.traffic)
    kernels.append(tracker.kernels)
    stage.finish()
    return traffic, kernels


def full_batch(layout: Layout, is_flat: bool, device: torch.device) -> Batch:
    """Return full rows of one document each, with every token trained.

    If ranks share rows, return the slice of the first rank, which is the longest.
    """
    rows, length = layout.micro_batch_size, layout.max_length
    slices = slice_lengths(rows * length, layout.row_ranks)
    is_shared = len(slices) > 1
    numbers = partial(torch.zeros, dtype=torch.int64, device=device)
    shape = (1, slices[0]) if is_flat else (rows, length)
    trained = slices[0] if is_shared else rows * (length - 1)
    return Batch(
        numbers(shape),
        numbers(shape) if is_flat else None,
        None if is_flat else numbers(shape),
        numbers(trained),
        numbers(trained),
        [length] * rows,
        torch.zeros(rows + 1, dtype=torch.int32, device=device),
        slices if is_shared else None,
    )


def _exchanged(top_k: int, step: Step, tokens: int, tiles: int) -> Iterator[int]:
    """Yield for each exchange the (token, expert) pairs sent to each rank, then those received."""
    ranks = step.world.layout.expert
    if ranks == 1:
        return iter(())
    numbers: list[int] = []
    for tile in torch.arange(tokens, device="meta").tensor_split(tiles):
        pairs = top_k * len(tile)
        sent = [pairs // ranks + (rank < pairs % ranks) for rank in range(ranks)]
        numbers += [*sent, *(round(step.imbalance * n) for n in sent)]
    return cycle(numbers)


def _watch_layers(layers: list[nn.Module], tracker: Tracker) -> None:
    """Tell the tracker which layer runs, by a place that models of two depths share."""

    def enter(place: int, *_: Any) -> None:
        tracker.enter(place)

    def leave(place: int, module: nn.Module, arguments: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(partial(enter, place))

    for i, layer in enumerate(layers):  # the second half counts from the end
        place = i if i < len(layers) // 2 else i - len(layers)
        layer.register_forward_pre_hook(partial(enter, place), prepend=True)
        layer.register_forward_hook(partial(leave, place))


_TOKENS_OF_PIECE = 256  # four chunks


def shorten_rows(mixers: list[nn.Module]) -> None:
    """Make gated delta rules cut each document into short rows from now on.

    Transformers' reference code loops over a row in chunks of 64 tokens, a dozen operators each, so
    that rows of 131,072 tokens would take minutes. Short rows save the same bytes for the backward,
    a state for each chunk, except where each channel has its own decay: those mixers keep long
    rows.
    """
    for mixer in filter(decays_by_head, mixers):
        is_called_per_document = "forward" in vars(mixer)
        # Cut inside the call by document, or a short row would join two documents.
        restore(mixer)
        mixer.forward = partial(_in_short_rows, mixer.forward)
        if is_called_per_document:
            call_one_by_one(mixer)


def _in_short_rows(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    given = tree_leaves((arguments, options))
    rows, tokens = next(x for x in given if isinstance(x, torch.Tensor)).shape[:2]
    if tokens % _TOKENS_OF_PIECE:
        return forward(*arguments, **options)
    long, short = (rows, tokens), (rows * tokens // _TOKENS_OF_PIECE, _TOKENS_OF_PIECE)
    arguments, options = _reshape((arguments, options), long, short)
    return _reshape(forward(*arguments, **options), short, long)


def _reshape(values: Any, old: tuple[int, int], new: tuple[int, int]) -> Any:
    """Reshape the tensors whose first dimensions (rows, tokens) are `old` to `new`."""

    def reshape(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(*new, *tensor.shape[2:]) if tensor.shape[:2] == old else tensor

    return tree_map_only(torch.Tensor, reshape, values)
