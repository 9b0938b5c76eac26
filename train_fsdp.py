#!/usr/bin/env python3
"""Fine-tune a HuggingFace causal language model with PyTorch FSDP.

torchrun --nproc_per_node=N train_fsdp.py [--config FILE] [section.key=value ...]
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import set_seed

from shardtune import checkpoint
from shardtune.arguments import read_run_arguments
from shardtune.config import Config, changed_keys, remarks, to_dict, write_config
from shardtune.console import quiet_libraries
from shardtune.dataset import PreparedData, build_encoder, open_prepared, prepare_data, require_sources
from shardtune.errors import Interrupted, Refused, all_of
from shardtune.evaluate import evaluate
from shardtune.export import Export, export_final, is_exported, model_assets
from shardtune.loss import require_separate_documents, summed_loss
from shardtune.metrics import Metrics, StepLines, peak_memory_bytes
from shardtune.model import build_model
from shardtune.opening import announce, describe_state, model_settings, require_same_config, require_same_model
from shardtune.optim import (
    build_optimizer,
    clip_gradients,
    global_gradient_norm,
    learning_rate,
    require_finite,
    set_learning_rate,
)
from shardtune.packing import Position, Schedule, Step, build_batch, make_schedule
from shardtune.rundir import RunDir, open_run_dir
from shardtune.signals import StopRequest, end_on_signal
from shardtune.source import read_model_config
from shardtune.stragglers import Stragglers
from shardtune.world import World, describe, join_world, run


def main() -> None:
    config = read_run_arguments(sys.argv[1:], Path(__file__).resolve().parent / "config.yaml")
    world = join_world(config.distributed)
    quiet_libraries(world.is_main)
    world.say(describe(world), on_every_node=True)
    for remark in remarks(config):
        world.say(remark)

    require_same_config(config, world)
    run_dir = open_run_dir(Path(config.run.dir), world)
    resumed = choose_checkpoint(config, run_dir, world)
    date = world.from_main(lambda: resumed.state["date"] if resumed else datetime.date.today().isoformat())
    world.progress.enter("preparing the data")
    model_config, _ = world.agree(
        lambda: all_of(
            lambda: read_model_config(config.model, config.data.max_length),
            lambda: require_sources(config.data) if world.is_node_main else None,
        )
    )
    encoder = world.agree(lambda: build_encoder(config.model.path, config.data, datetime.date.fromisoformat(date)))
    data = open_prepared(Path(world.on_each_node(lambda: str(prepare_data(config.data, encoder, world.say)))))
    world.agree(lambda: data.require_vocabulary(encoder.tokenizer, model_config.get_text_config().vocab_size))
    schedule = plan_steps(config, data, resumed, world)

    assets = world.agree(lambda: model_assets(model_config, config.model.path, encoder.tokenizer))
    if resumed:
        require_same_model(resumed, assets)
    checkpoint.delete_unfinished(run_dir, resumed, world)
    if resumed and resumed.step >= schedule.total_steps:
        write_final_model(config, resumed, assets, run_dir, world)
        world.say(f"Finished: {resumed.name} is the last of {schedule.total_steps} steps. Nothing is left to do.")
        return
    world.progress.enter("loading the model")
    model = world.agree(lambda: build_model(config, model_config, world))
    optimizer = build_optimizer(model, config.optimizer)
    world.say(describe_state(model))
    set_seed((config.run.seed + world.rank) % 2**32)
    if config.data.packing:
        require_separate_documents(model, world.device)
    if resumed:
        checkpoint.load_checkpoint(resumed, model, optimizer, config.run.seed, run_dir, world)
    for moved in checkpoint.set_aside(run_dir, resumed, world):
        world.say(f"Set aside, not being part of this run: {moved}")
    world.from_main(lambda: write_config(config, run_dir.path / "config.yaml"))
    if resumed:
        world.say(f"Resumed from {resumed.name}")
    metrics = Metrics(run_dir.path / "metrics.jsonl", world, resumed.step if resumed else None)
    saver = checkpoint.Saver(
        run_dir, config.checkpoint, config.distributed.save_timeout_s, model, optimizer, assets, world
    )
    fixed = {"date": date, "data": data.key, "config": to_dict(config), "model": model_settings(assets)}
    last = train(config, schedule, data, fixed, model, optimizer, metrics, saver, world, is_resumed=bool(resumed))
    end_on_signal("after the last step was saved, while the final model was written", code=75)
    write_final_model(config, last, assets, run_dir, world)


def train(
    config: Config,
    schedule: Schedule,
    data: PreparedData,
    fixed: dict[str, Any],
    model: Any,
    optimizer: torch.optim.Optimizer,
    metrics: Metrics,
    saver: checkpoint.Saver,
    world: World,
    is_resumed: bool,
) -> checkpoint.Checkpoint:
    """All the steps that are left, with their evaluations and checkpoints; the last checkpoint."""
    lines = StepLines(world, schedule.total_steps, config.logging.every_steps)
    stop, stragglers = StopRequest(), Stragglers(model, metrics, world)
    if config.eval.baseline and not is_resumed:
        evaluate_at(0, config, data, model, metrics, world)
    step_ended = time.perf_counter()
    for step in schedule.steps():
        lr = learning_rate(step.number, schedule.total_steps, config.optimizer.lr, config.scheduler)
        set_learning_rate(optimizer, lr)
        loss, grad_norm = train_step(config, step, data, model, optimizer, world)
        must_stop, memory_bytes = world.maxima(stop.received is not None, peak_memory_bytes(world.device))
        stragglers.step_ended(step.number)
        world.limit_steps(config.distributed.step_timeout_s)

        seconds = time.perf_counter() - step_ended
        told = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": step.tokens, "seconds": seconds}
        metrics.write("step", step=step.number, epoch=step.epoch, trained_tokens=step.trained_tokens, **told)
        lines.step_ended(step.number, memory_bytes=memory_bytes, **told)
        is_last = step.number == schedule.total_steps
        # Before the save: a run that ends between the two repeats the step, and so has every evaluation.
        if is_last or is_due(step.number, config.eval.every_steps):
            evaluate_at(step.number, config, data, model, metrics, world)
            must_stop = must_stop or world.maxima(stop.received is not None)[0]
        saver.say_if_ended()
        world.progress.enter("saving")
        if is_last or must_stop or is_due(step.number, config.checkpoint.every_steps):
            saver.save(vars(step.end) | fixed, metrics.sync)
        if is_last or must_stop:
            last = saver.finish()
        if must_stop and not is_last:
            raise Interrupted(
                f"stopped by {stop.received or 'a signal to another rank'} after saving step {step.number} - run the "
                f"same command again{'' if config.run.resume == 'auto' else ' with run.resume=auto'} to resume"
            )
        step_ended = time.perf_counter()
    return last


def evaluate_at(step: int, config: Config, data: PreparedData, model: Any, metrics: Metrics, world: World) -> None:
    """The perplexity over the evaluation data, if there is any, said and written; step 0 is the baseline."""
    if data.eval is None:
        return
    world.progress.enter("evaluation", step)
    found = evaluate(
        model,
        data.eval,
        world,
        max_length=config.data.max_length,
        packing=config.data.packing,
        rows_per_micro_batch=config.train.micro_batch_size,
    )
    label, tail = ("Baseline", "") if step == 0 else ("Eval", f" | Step: {step}")
    world.say(f"{label} Perplexity: {found.perplexity:.4f} | Loss: {found.loss:.4f} | Tokens: {found.tokens}{tail}")
    metrics.write("eval", step=step, loss=found.loss, perplexity=found.perplexity, tokens=found.tokens)


def train_step(
    config: Config, step: Step, data: PreparedData, model: Any, optimizer: torch.optim.Optimizer, world: World
) -> tuple[float, float]:
    """One optimizer step over its global batch; the exact loss per trained token and the global gradient norm.

    Raises:
        Stopped: on every rank and before the update, if either is not finite.
    """
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    for sequences in step.micro_batches(world.rank, world.size, config.train.micro_batch_size):
        world.progress.enter("data", step.number)
        batch = build_batch(data.train, sequences, config.data.packing).to(world.device)
        world.progress.enter("forward and backward")
        micro_batch_sum = summed_loss(model, batch)
        # FSDP2 averages gradients over ranks; the factor turns that into the sum over ranks per trained token.
        (micro_batch_sum * (world.size / max(1, step.trained_tokens))).backward()
        loss_sum += micro_batch_sum.detach()
    with world.progress.waiting():
        dist.all_reduce(loss_sum)
        norm = global_gradient_norm(model)
    loss, grad_norm = loss_sum.item() / max(1, step.trained_tokens), norm.item()
    require_finite(step.number, loss, grad_norm, model, world)
    world.progress.enter("optimizer")
    if config.train.max_grad_norm is not None:
        clip_gradients(model, config.train.max_grad_norm, norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss, grad_norm


def choose_checkpoint(config: Config, run_dir: RunDir, world: World) -> checkpoint.Checkpoint | None:
    """The checkpoint to resume from, on which all ranks agree; what changed since is said, or refused."""
    found = checkpoint.agree_on_checkpoint(run_dir, config.run.resume, world)
    if found is None:
        return None
    allowed, forbidden = changed_keys(found.state["config"], config)
    if forbidden:
        raise Refused(
            *(
                f"{key} is {json.dumps(new)} and was {json.dumps(old)} in {found.name} - set it back, or "
                "start anew with another run.dir"
                for key, old, new in forbidden
            )
        )
    if found.world_size != world.size:
        allowed.append(("world size", found.world_size, world.size))
    for key, old, new in allowed:
        world.say(f"Changed since {found.name}: {key} was {json.dumps(old)}, is {json.dumps(new)}")
    return found


def plan_steps(config: Config, data: PreparedData, resumed: checkpoint.Checkpoint | None, world: World) -> Schedule:
    """The schedule, which all ranks share; every number derived from it is said."""
    train, section = data.train, config.train
    rows_per_step = section.micro_batch_size * section.gradient_accumulation_steps * world.size
    schedule = make_schedule(
        train,
        max_length=config.data.max_length,
        packing=config.data.packing,
        seed=config.run.seed,
        rows_per_step=rows_per_step,
        epochs=section.epochs,
        max_steps=section.max_steps,
        start=Position(*(resumed.state[key] for key in ("step", "epoch", "row"))) if resumed else Position(),
    )
    rows = schedule.rows_per_epoch
    if rows < world.size:
        raise Refused(
            f"an epoch has {rows} rows and the run {world.size} ranks - add data, lower data.max_length, "
            "set data.packing=false, or use fewer ranks"
        )
    keys = world.gather(data.key)
    if len(set(keys)) > 1:
        other = next(rank for rank, key in enumerate(keys) if key != keys[0])
        raise Refused(
            f"the data of rank {other} (digest {keys[other]}) is not that of rank 0 ({keys[0]}) - "
            "copy the same data, model and code to every node"
        )
    if resumed and resumed.state["data"] != data.key:
        raise Refused(
            f"the data (digest {data.key}) is not that of {resumed.name} ({resumed.state['data']}) - "
            "bring the same data, tokenizer and code back, or start anew with another run.dir"
        )
    announce(config, data, schedule, world)
    return schedule


def write_final_model(
    config: Config, last: checkpoint.Checkpoint, assets: dict[str, bytes], run_dir: RunDir, world: World
) -> None:
    world.progress.enter("writing the final model", last.step)
    out = run_dir.path / "model"
    export = Export(last, config.export.dtype, assets)
    if config.export.final and not world.from_main(lambda: is_exported(export, out)):
        export_final(export, out, run_dir, world)
        world.say(f"Saved the final model in {out}")


def is_due(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


if __name__ == "__main__":
    run(main)
