"""The state that all parts of the training loop share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from shardtune.checkpoint import Saver
from shardtune.checkpoint.export.live import Best
from shardtune.data.dataset import PreparedData
from shardtune.data.schedule import Cost, Schedule
from shardtune.training.observers.expert_balance import ExpertBalance
from shardtune.training.observers.export_command import ExportCommand, StepExport
from shardtune.training.observers.metrics import Metrics, StepObserver
from shardtune.training.pipeline import Stage
from shardtune.training.run import Run
from shardtune.training.states.host_states import HostStates
from shardtune.training.states.replica_shards import OwnedParameters
from shardtune.training.states.reshard import ReshardPolicy
from shardtune.training.states.sharded_optimizer import ShardedOptimizer


class Prediction(TypedDict):
    """A plan's figures and verdict, JSON-able: rank 0 gets them from its planning process."""

    # The peak of the fullest rank: on a GPU of its tensors; on a CPU of its process, less the
    # memory that the process holds before the weights.
    peak_bytes: int
    source: str  # "simulated step" or "bound from shapes"
    fits: bool
    verdict: str
    remedies: list[str]  # that would let it fit, the best first
    step_s: float | None  # the least time of a step, None if it is not known
    bound_by: str | None  # the part of the machine that takes that time
    # Per stage the fields of its `ReshardPolicy`; that of gradients holds for all stages.
    policies: list[tuple[int, bool, bool]]
    tiles: int  # see `tile_layers`


@dataclass(frozen=True)
class TrainContext:
    """All that the steps of a run share."""

    run: Run
    data: PreparedData
    schedule: Schedule
    model: Any
    is_flat: bool  # a batch is one row without padding
    owned: OwnedParameters
    host: HostStates | None  # with optimizer.offload
    optimizer: ShardedOptimizer
    reshard: ReshardPolicy
    stage: Stage
    row_cost: Cost
    metrics: Metrics
    expert_balance: ExpertBalance  # counts in the forward; one of the observers too
    observers: Sequence[StepObserver]
    saver: Saver
    best: Best | None  # with eval.keep_best
    command: ExportCommand
    step_export: StepExport  # one of the observers too
    run_state: dict[str, Any]  # goes into each checkpoint, beside the position in the data
