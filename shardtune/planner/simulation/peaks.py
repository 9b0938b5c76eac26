"""Add the optimizer's state and update to a simulated step's peaks, or bound them by shapes."""

from collections import Counter
from typing import Any

from transformers import PreTrainedModel

from shardtune.config import Config
from shardtune.distributed.tensors import gathered_numel
from shardtune.distributed.world import World
from shardtune.planner.arithmetic.figures import Cause, Peak
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.arithmetic.shapes import Shapes
from shardtune.planner.simulation.simulate import Measured
from shardtune.training.states.reshard import kept_bytes
from shardtune.training.states.sharded_optimizer import ShardedOptimizer, StateBytes

_PASSES = ("evaluate", "forward", "backward")
_COPIES_OF_GATHERED = 2  # FSDP's buffer, and the parameters that are copied out of it
_COPIES_OF_ACTIVATIONS = 4  # input and output of a product, with norms, and gradients of both
_WIDEST_BYTES = 4  # float32


def step_memory(
    measured: Measured,
    states: StateBytes,
    optimizer: ShardedOptimizer,
    pieces: int,
    machine: Machine,
    gathered: int = 0,
) -> tuple[dict[str, Peak], int]:
    """Return the peak of each phase, and the memory that the allocator takes.

    `pieces`: bytes of an offloaded update's pieces. `gathered`: bytes of parameters that stay
    gathered in all passes.
    """
    workspace = max(map(optimizer.eager_bytes, optimizer.trained))
    peaks = _peaks(measured, states, workspace + pieces, gathered)
    # A GPU's allocator keeps freed memory for its stream, so the streams' peaks add up.
    pools: Counter[int] = Counter()
    for (phase, _, stream), size in measured.pools.items():
        more = gathered * (phase in _PASSES and stream == 0)
        pools[stream] = max(pools[stream], size + more)
    # The default stream holds the optimizer's state, too.
    kept = pools.total() + states.optimizer + pieces if machine.is_gpu else 0
    highest = max(kept, *(peak.n_bytes for peak in peaks.values()))
    return peaks, highest


def _peaks(
    measured: Measured, states: StateBytes, update_bytes: int, gathered: int
) -> dict[str, Peak]:
    """Return the peak of each phase, with the optimizer's state, which the simulation lacks."""
    optimizer = Counter({Cause.OPTIMIZER: states.optimizer})
    weights = Counter({Cause.PARAMETERS: states.parameters})
    gradients = 0 if states.host else states.gradients
    updated = weights + optimizer + Counter({Cause.GRADIENTS: gradients})
    updated[Cause.UPDATE] = update_bytes
    by_cause = {"load": weights}
    for phase in (*_PASSES, "optimizer"):
        peaks = (peak for (name, _), peak in measured.peaks.items() if name == phase)
        by_cause[phase] = max(peaks, key=lambda peak: peak.n_bytes).by_cause + optimizer
    for phase in _PASSES:
        by_cause[phase][Cause.GATHERED] += gathered
    # The update frees its workspace before new weights are gathered: the larger one counts.
    by_cause["optimizer"] = max(updated, by_cause["optimizer"], key=Counter.total)
    by_cause["save"] = weights + optimizer  # gradients are dropped before
    return {phase: Peak(causes.total(), causes) for phase, causes in by_cause.items()}


def bounded_memory(
    model: PreTrainedModel, shapes: Shapes, config: Config, states: StateBytes, world: World
) -> Peak:
    """Return an upper bound of the peak of any phase, by shapes alone.

    `model` comes from `build_on_meta`. All parameters and gradients count as unsharded at once,
    each product as kept for the backward, and attention as masked: a bound that is too low would
    start a run that cannot end.
    """
    head: Any = model.get_output_embeddings()
    logits = head.weight.shape[0] if getattr(head, "weight", None) is not None else 0
    # With recomputation layers keep their inputs alone, and the backward has one layer whole.
    scores = max(heads.queries for heads in shapes.heads) * world.layout.max_length
    layers = shapes.by_stage(world.layout.stages)[world.stage].per_layer
    kept = [layer.products + scores for layer in layers]
    if world.layout.keeps_inputs_alone:
        kept = [max(kept, default=0), len(kept) * shapes.hidden_size]
    activations = world.layout.tokens_per_rank * (sum(kept) + logits) * _WIDEST_BYTES
    largest = max(gathered_numel(p) for p in model.parameters()) * _WIDEST_BYTES
    # The copies of an asynchronous save are in a CPU process's own memory.
    staging = 0
    if world.device.type == "cpu" and config.checkpoint.mode == "async":
        staging = states.parameters + states.optimizer
    parameters, *others = kept_bytes(model, world.layout)
    gathered = _COPIES_OF_GATHERED * (sum(parameters) + sum(others))
    # A parameter is loaded and updated in float32.
    beside = gathered + _COPIES_OF_ACTIVATIONS * activations + 2 * largest + staging
    by_cause = Counter(
        {
            Cause.PARAMETERS: states.parameters,
            Cause.GRADIENTS: states.gradients,
            Cause.OPTIMIZER: states.optimizer,
            Cause.BOUNDED: beside,
        }
    )
    return Peak(by_cause.total(), by_cause)
