"""Build the parts that the steps of a run share: model, optimizer, metrics and saver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from transformers import PretrainedConfig, PreTrainedModel, set_seed

from shardtune import checkpoint
from shardtune.checkpoint.export.live import (
    Best,
    LiveModel,
    StepModels,
    is_step_model,
    step_model,
)
from shardtune.config import Config
from shardtune.config_io import write_config
from shardtune.data.dataset import PreparedData
from shardtune.data.schedule import Schedule
from shardtune.distributed.progress import Phase
from shardtune.distributed.tensors import DTYPES
from shardtune.distributed.world import World
from shardtune.log import logger
from shardtune.model import build
from shardtune.model.compiled_layers import compile_layers
from shardtune.model.documents.attention_choice import choose_attention
from shardtune.model.facts.facts import ModelFacts
from shardtune.model.flops import DevicePeak, MfuMeter
from shardtune.model.loss import compile_loss, use_loss_head
from shardtune.model.recomputation import tile_layers
from shardtune.model.stages import layers_in
from shardtune.run_files import METRICS, read_entries
from shardtune.training import optim
from shardtune.training.context import Prediction, TrainContext
from shardtune.training.observers.expert_balance import ExpertBalance
from shardtune.training.observers.export_command import ExportCommand, StepExport, is_due
from shardtune.training.observers.metrics import Metrics
from shardtune.training.observers.profiler import StepProfiler
from shardtune.training.observers.sinks import open_sinks
from shardtune.training.observers.step_log import LossSpikes, StepLog
from shardtune.training.observers.stragglers import Stragglers
from shardtune.training.out_of_memory import step_fits, weights_fit
from shardtune.training.pipeline import Stage
from shardtune.training.run import Run, saved_reshard_policy, state_of_run
from shardtune.training.start_log import log_model
from shardtune.training.states import reshard
from shardtune.training.states.host_states import HostStates
from shardtune.training.states.replica_shards import OwnedParameters
from shardtune.training.states.sharded_optimizer import ShardedOptimizer, state_bytes


def build_train_context(
    run: Run,
    model_config: PretrainedConfig,
    facts: ModelFacts,
    data: PreparedData,
    assets: Mapping[str, bytes],
    schedule: Schedule,
    prediction: Prediction,
    device_peak: DevicePeak,
) -> TrainContext:
    """Load the model and its optimizer, and open all that watches and writes the run."""
    config, world = run.config, run.world
    # Files of other runs are moved aside only when the checkpoint is loaded.
    states, whole, policy, is_flat = load_model(run, model_config, facts, data, prediction)
    model, owned, host, optimizer = states
    world.on_rank0(lambda: write_config(run.config, run.directory.path / "config.yaml"))
    _say_where_earlier_steps_are(run)
    # On node 0's disk, with the trackers that the configuration names.
    sinks = partial(open_sinks, config, run.directory.path, run.resumed_step)
    metrics = Metrics(run.metrics_file, world, run.resumed_step, sinks)
    run_state = state_of_run(run, model_config, assets, data, policy)
    timeout_s = config.distributed.save_timeout_s
    saver = checkpoint.Saver(
        run.directory, config.checkpoint, timeout_s, model, optimizer, assets, world
    )
    live = partial(
        LiveModel, run.directory, config, model, optimizer, whole, assets, run_state, world
    )
    best, command, step_export = open_exports(run, live, metrics, schedule, bool(data.eval))
    expert_balance = ExpertBalance(model, whole, metrics, world)
    mfu = MfuMeter(facts.flops, facts.uncounted, device_peak, world.size)
    return TrainContext(
        run=run,
        data=data,
        schedule=schedule,
        model=model,
        is_flat=is_flat,
        owned=owned,
        host=host,
        optimizer=optimizer,
        reshard=policy,
        stage=Stage(model, owned, world),
        row_cost=facts.row_cost,
        metrics=metrics,
        expert_balance=expert_balance,
        observers=[
            Stragglers(model, metrics, world),  # first, because all ranks meet in it
            StepLog(metrics, mfu, schedule.total_steps, saver),
            LossSpikes(run.config),
            expert_balance,
            StepProfiler(run.directory.path, config.logging, metrics, schedule, world),
            step_export,
        ],
        saver=saver,
        best=best,
        command=command,
        step_export=step_export,
        run_state=run_state,
    )


def load_model(
    run: Run,
    model_config: PretrainedConfig,
    facts: ModelFacts,
    data: PreparedData,
    prediction: Prediction,
) -> tuple[States, PreTrainedModel, reshard.ReshardPolicy, bool]:
    """Build the sharded model and its optimizer, and load the checkpoint to resume from.

    Return them, the model of all stages on meta, the policy, and whether rows are flat.
    """
    # All trials of the model run on the source's weights, before the checkpoint is loaded: a resume
    # decides as the start did.
    config, world = run.config, run.world
    world.progress.enter(Phase.LOADING)
    states = build_states(config, model_config, facts, world)
    model = states.model
    whole = build.whole_on_meta(config, model_config, world.layout)
    log_model(whole, facts, config, state_bytes(model, states.optimizer, world.layout), world)
    planned = reshard.ReshardPolicy(*prediction["policies"][world.stage])
    policy = reshard.choose_reshard_policy(model, saved_reshard_policy(run), planned, world)
    set_seed((config.run.seed + world.rank) % 2**32)  # dropout differs between ranks
    is_flat = prepare_forward(model, facts, config, data, prediction["tiles"], world)
    load_states(states, run)
    return states, whole, policy, is_flat


class States(NamedTuple):
    """A sharded model, the parameters that this rank updates, and their optimizer."""

    model: PreTrainedModel
    owned: OwnedParameters
    host: HostStates | None  # with optimizer.offload
    optimizer: ShardedOptimizer


def build_states(
    config: Config, model_config: PretrainedConfig, facts: ModelFacts, world: World
) -> States:
    """Read or draw the weights, each rank its slices, and build their optimizer."""
    with weights_fit(world.layout):
        model = world.run_on_all_ranks(
            lambda: build.build_model(config, model_config, facts, world)
        )
    owned = OwnedParameters(model, world)
    host = HostStates(owned) if world.layout.offloads else None
    optimizer = optim.build_optimizer(owned, config, host)
    optim.compile_update(optimizer, config, world)
    return States(model, owned, host, optimizer)


def load_states(states: States, run: Run) -> None:
    model, owned, host, optimizer = states
    resumed, seed, world = run.resumed, run.config.run.seed, run.world
    if resumed:
        checkpoint.load_checkpoint(resumed, model, optimizer, seed, run.directory, world)
        if host:
            # A checkpoint has masters. The device's rounded weights follow from them, first this
            # rank's parts, then the parts of other replicas.
            host.round_masters()
            owned.gather()
    checkpoint.clear_leftovers(run.directory, resumed, world)
    if resumed:
        logger.info(f"Resumed from {resumed.name}")


def _say_where_earlier_steps_are(run: Run) -> None:
    """Name the node whose disk was node 0's before the resume: rank 0 alone writes the file."""
    resumed, world = run.resumed, run.world
    if resumed is None or run.directory.is_shared:
        return
    has_step = any(
        e["step"] == resumed.step for e, _ in read_entries(run.metrics_file, resumed.step)
    )
    per_rank = world.all_gather_json([has_step, world.node_name])
    nodes = dict.fromkeys(node for has_it, node in per_rank if has_it)
    if nodes and world.node_name not in nodes:
        logger.info(
            f"{METRICS}: the steps up to {resumed.step} are on {next(iter(nodes))} - `shardtune "
            "report` shows both folders together"
        )


def open_exports(
    run: Run,
    live_model: Callable[[], LiveModel],
    metrics: Metrics,
    schedule: Schedule,
    has_eval_data: bool,
) -> tuple[Best | None, ExportCommand, StepExport]:
    """Open what writes models, and runs on them. `live_model` is called if models are written."""
    config, world = run.config, run.world
    shell_command = config.export.command if world.is_main else None  # once a run
    timeout_s, keep = config.distributed.save_timeout_s, config.export.keep
    command = ExportCommand(shell_command, run.directory.path, keep, timeout_s, metrics)
    every, keeps_best = config.export.every_steps, config.eval.keep_best and has_eval_data
    best = models = None
    if every or keeps_best:
        live = live_model()
        if keeps_best:
            best = Best(run.directory, live, world)
            if run.resumed and (kept := best.resume(run.resumed)):
                metrics.write(kept)  # in place of the line that the resume has dropped
        if every:
            models = StepModels(run.directory, live, keep, world)
    return best, command, StepExport(models, command, schedule, config.export)


def find_pending_model(run: Run, schedule: Schedule) -> int | None:
    """Return the step that the run resumes from, if its model is due and rank 0 lacks it.

    A run is killed while it writes the model of a step whose checkpoint is there. Collective.
    """
    resumed, config = run.resumed, run.config.export
    if not resumed or not config.every_steps or not is_due(resumed.step, schedule, config):
        return None
    folder = step_model(run.directory, resumed.step)
    return None if run.world.on_rank0(lambda: is_step_model(folder)) else resumed.step


def prepare_forward(
    model: PreTrainedModel,
    facts: ModelFacts,
    config: Config,
    data: PreparedData,
    tiles: int,
    world: World,
) -> bool:
    """Choose how the model attends and makes logits, compile it, and return if rows are flat.

    `tiles`: the number of parts of a row on which experts and MLPs run.
    """
    # Compilation comes last: it compiles the forwards that the steps before have chosen.
    layers = layers_in(model, facts.layer_names)
    if tiles > 1:
        tile_layers(model, layers, tiles)
        logger.info(f"Tiles: experts and MLPs run on a row's tokens in {tiles} parts, as planned")
    with step_fits(world.layout):
        is_flat = choose_attention(model, data.longest, world)
    # Only the last stage has a head, and only rank 0 logs.
    whole_logits = use_loss_head(model, world.device) if world.is_last_stage else None
    if logits := world.all_gather_json(whole_logits)[-1]:
        logger.info(f"Loss: logits are made {logits}")
    compile_layers(layers, config.model.compile, world)
    if world.is_last_stage:
        dtype = DTYPES[world.layout.compute_dtype]
        compile_loss(model, dtype, world.device, bool(data.eval))
    return is_flat
