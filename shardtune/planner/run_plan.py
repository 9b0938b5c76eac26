"""Plan a run before its weights load, and compare the plan with the run at its end.

A bound from shapes that is far below the memory is the plan. Otherwise a process of rank 0
simulates a step while the data is tokenized.
"""

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedConfig

from shardtune.cards import Card, card_of
from shardtune.config import Config, resume_may_change
from shardtune.config_io import to_dict
from shardtune.distributed.host_memory import available_memory
from shardtune.distributed.join import native_dtype
from shardtune.distributed.measured import CPU, read_measured
from shardtune.distributed.rank_record import RECORDS, STACK
from shardtune.distributed.signals import die_with_parent
from shardtune.distributed.tensors import DTYPES
from shardtune.distributed.world import World
from shardtune.errors import UserError
from shardtune.log import logger, quiet_libraries
from shardtune.metrics_schema import PlanEntry
from shardtune.model.flops import device_peak
from shardtune.model.source.files import read_model_config
from shardtune.planner.arithmetic.machine import Machine
from shardtune.planner.command.text import lacking, verdict
from shardtune.planner.make_plan import bound_plan, make_plan
from shardtune.planner.mesh import as_arguments, launch_command
from shardtune.planner.plan import Plan
from shardtune.planner.search import Search
from shardtune.planner.simulation.extrapolate import Simulations
from shardtune.run_files import read_entries
from shardtune.training.context import Prediction
from shardtune.training.observers.metrics import Metrics, peak_memory_bytes
from shardtune.training.run import Run
from shardtune.units import gb

_BOUND_SUFFICES = 0.1  # share of the memory below which a bound is the plan
_SIMULATED_WITHIN_S = 180.0
_CHECKOUT = Path(__file__).resolve().parents[2]


class RunPlan:
    """The plan of one run. Every method is collective."""

    def __init__(self, run: Run, model_config: PreTrainedConfig) -> None:
        """Start the plan on rank 0, in a process beside the run's own work."""
        config, world = run.config, run.world
        self._run, self._model_config = run, model_config
        self.device_peak = device_peak(DTYPES[world.layout.compute_dtype], world)
        # Uneven nodes count as one node with all ranks.
        ranks_per_node = world.local_size if world.size % world.local_size == 0 else world.size
        nodes = world.size // ranks_per_node
        is_gpu = world.layout.is_gpu
        device = torch.cuda.get_device_name(world.device) if is_gpu else CPU
        card = card_of(device)
        measured = read_measured(
            run.directory.path, nodes, ranks_per_node, lambda name: device in name.split(" and ")
        )
        self._machine = Machine(
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            memory_bytes=min(world.all_gather_json(_memory_bytes(world))),
            node_bytes_per_s=measured.node_bytes_per_s or math.inf,
            rank_bytes_per_s=measured.rank_bytes_per_s
            or (card.link_bytes_per_s if card else math.inf),
            flops_per_s=self.device_peak.flops_per_s or math.inf,
            is_gpu=is_gpu,
            card=card,
            native_dtype=native_dtype(world.device),
            host_bytes=min(world.all_gather_json(available_memory())),
        )
        self._held_bytes = 0  # by a CPU process before the run's tensors exist
        self._prediction: Prediction | None = None
        self._process: subprocess.Popen[str] | None = None
        if world.is_main:
            self._bound = bound_plan(config, model_config, self._machine, world)
            limit = _BOUND_SUFFICES * self._machine.memory_bytes
            if self._bound.allocated_bytes > limit or not self._bound.host_fits:
                self._process = _simulate(run, self._machine)

    def require_fit(self) -> Prediction:
        """Log the verdict, and a mesh that the preflight's bandwidths make much faster.

        Call it just before loading, so that the simulation has the time until then.

        Raises:
            UserError: the run does not fit, and `run.ignore_plan` is false.
        """
        config, world = self._run.config, self._run.world
        # Only rank 0 has the plan; all ranks must agree to start or to refuse.
        self._prediction = prediction = world.on_rank0(self._predict)
        if not self._machine.is_gpu:
            held = psutil.Process().memory_info().rss
            self._held_bytes = int(max(world.all_gather_json(held)))
        if prediction["fits"]:
            logger.info(f"Plan: {prediction['verdict']}")
        elif config.run.ignore_plan:
            logger.info(
                f"Plan: {prediction['verdict']}; the run starts all the same (run.ignore_plan=true)"
            )
        else:
            raise UserError(
                f"{prediction['verdict']} - use {', or '.join(prediction['remedies'])}; "
                "run.ignore_plan=true starts it all the same"
            )
        if world.is_main:
            self._suggest_mesh()
        return prediction

    def _suggest_mesh(self) -> None:
        """Log on rank 0 a mesh with which a step takes less than two thirds of the time."""
        search = Search(self._bound, Simulations(self._model_config))
        if fastest := search.much_faster_mesh():
            configured = search.configured
            logger.info(
                f"Mesh: a step takes at least {configured.floor_s:.3g} s, {configured.bound_by}, "
                f"by the bandwidths of the preflight, and {fastest.floor_s:.3g} s with "
                f"{launch_command(fastest, sys.argv[1:])} (shardtune plan simulates its memory)"
            )

    @contextlib.contextmanager
    def compared(self, metrics: Metrics) -> Iterator[None]:
        """Write the plan to metrics.jsonl, and again after the steps with the measured figures."""
        run, prediction = self._run, self._prediction
        assert prediction
        first_step = run.resumed.step if run.resumed else 0
        planned = PlanEntry(
            kind="plan",
            step=first_step,
            memory_bytes=int(self._machine.memory_bytes),
            predicted_peak_bytes=prediction["peak_bytes"] + self._held_bytes,
            source=prediction["source"],
            predicted_step_seconds=prediction["step_s"],
            bound_by=prediction["bound_by"],
        )
        metrics.write(planned)
        yield
        (peak,) = run.world.all_reduce_max(peak_memory_bytes(run.world.device))
        if not run.world.is_main:
            return
        entries = [entry for entry, _ in read_entries(run.metrics_file, sys.maxsize)]
        steps = [e for e in entries if e["kind"] == "step" and e["step"] > first_step]
        if not steps:  # an evaluation alone was left
            return
        # The first step sets things up.
        seconds = statistics.median(entry["seconds"] for entry in steps[1:] or steps)
        last_step: int = steps[-1]["step"]
        metrics.write(
            planned | {"step": last_step, "peak_bytes": int(peak), "step_seconds": seconds}
        )
        logger.info(_comparison(prediction, self._held_bytes, peak, seconds))

    def _predict(self) -> Prediction:
        """Wait on rank 0 for the simulated plan, or return the bound."""
        if self._process is None:
            return as_prediction(self._bound)
        # The agent ends a rank that does nothing for longer than a step may take.
        timeout_s = min(_SIMULATED_WITHIN_S, self._run.config.distributed.step_timeout_s / 2)
        try:
            out, err = self._process.communicate(timeout=timeout_s)
            return json.loads(out.strip().splitlines()[-1])  # libraries may print lines before it
        except subprocess.TimeoutExpired:
            self._process.kill()
            why = f"it took more than {timeout_s:.0f} s"
        except (ValueError, IndexError):
            ended = f"its process ended with {self._process.returncode}"
            why = (err.strip().splitlines() or [ended])[-1]
        logger.info(f"Plan: no step could be simulated ({why})")
        return as_prediction(self._bound)


def _memory_bytes(world: World) -> float:
    """Return the memory that this rank may take: its GPU's, or its share of the host's."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_properties(world.device).total_memory
    return available_memory() / world.local_size


def _simulate(run: Run, machine: Machine) -> subprocess.Popen[str]:
    """Start a process that simulates a step, and prints a `Prediction`."""
    request = {
        "config": to_dict(run.config),
        "machine": asdict(machine),
        "is_resumed": run.resumed is not None,
        "parent": os.getpid(),
    }
    # The process is no rank: it must not write into the rank's record or stack.
    env = {key: value for key, value in os.environ.items() if key not in (RECORDS, STACK)}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_CHECKOUT), env.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "shardtune.planner.run_plan", json.dumps(request)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def _predict_in_process(request: dict[str, Any]) -> Prediction:
    """Simulate a step; if the run does not fit, look for changes that make it fit."""
    config = Config.model_validate(request["config"])
    machine = Machine(**request["machine"])
    if machine.card:
        machine = replace(machine, card=Card(**request["machine"]["card"]))
    model_config = read_model_config(config.model)
    simulations = Simulations(model_config)
    plan = make_plan(config, model_config, machine, simulations)
    must_fit = plan.cannot_fit and not config.run.ignore_plan
    is_allowed = resume_may_change if request["is_resumed"] else bool
    changes = Search(plan, simulations, is_allowed).changes() if must_fit else []
    return as_prediction(plan, changes)


def as_prediction(plan: Plan, changes: Sequence[Plan] = ()) -> Prediction:
    """Return a plan's figures and verdict. `changes`: plans that fit."""
    keep_gradients = all(policy.keep_gradients for policy in plan.policies)
    keep_sums = all(policy.keep_sums for policy in plan.policies)
    beside_tensors = 0 if plan.machine.is_gpu else plan.peak_bytes - plan.pools_bytes
    return Prediction(
        peak_bytes=plan.allocated_bytes + beside_tensors,
        source="simulated step" if plan.is_simulated else "bound from shapes",
        fits=not plan.cannot_fit,
        verdict=verdict(plan),
        remedies=[
            *(f"{' '.join(as_arguments(c.values))} ({gb(c.peak_bytes, 2)} GB)" for c in changes),
            lacking(plan),
        ],
        step_s=plan.floor_s or None,
        bound_by=plan.bound_by,
        policies=[(groups, keep_gradients, keep_sums) for groups in plan.kept_groups],
        tiles=plan.tiles,
    )


def _comparison(prediction: Prediction, held_bytes: int, peak: float, seconds: float) -> str:
    """Return a line that compares measured peak and time with the planned ones."""
    at_most = "" if prediction["source"] == "simulated step" else "at most "
    # On CPUs the measured peak is the whole process's, which holds more than planned tensors.
    before = f" ({gb(held_bytes, 2)} GB before the weights, the rest tensors)"
    held = before if held_bytes else ""
    process = " (the process, with mapped files and freed memory)" if held_bytes else ""
    step = "-"
    if prediction["step_s"]:
        step = f"at least {prediction['step_s']:.3g} s ({prediction['bound_by']}, full rows)"
    return (
        f"Predicted peak memory: {at_most}{gb(prediction['peak_bytes'] + held_bytes, 2)} GB{held} "
        f"| Measured: {gb(peak, 2)} GB{process} | "
        f"Predicted step time: {step} | Measured: {seconds:.3g} s (median)"
    )


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    die_with_parent(given["parent"])
    quiet_libraries(is_main=False)
    print(json.dumps(_predict_in_process(given)))
