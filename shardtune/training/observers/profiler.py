"""Profile some steps on each rank: a trace, and the seconds of each phase."""

from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from shardtune.config import LoggingConfig
from shardtune.data.schedule import Schedule
from shardtune.distributed.world import World
from shardtune.errors import first_line
from shardtune.log import logger, node_logger
from shardtune.metrics_schema import ProfileEntry
from shardtune.training.observers.metrics import Metrics, StepEnded, StepObserver

_OPERATORS = 10  # the most expensive operators, in the table
_MOST_STEPS = 10  # more would fill the host's memory


class StepProfiler(StepObserver):
    """Profiles the steps from the first to the last of `logging.profile_steps`.

    Each rank writes into `profile/` of the run: a Chrome trace, a table of its most expensive
    operators and, on a GPU, the owners of its memory.
    """

    def __init__(
        self,
        run_dir: Path,
        config: LoggingConfig,
        metrics: Metrics,
        schedule: Schedule,
        world: World,
    ) -> None:
        self._metrics, self._world, self._folder = metrics, world, run_dir / "profile"
        steps = config.profile_steps
        first, last = steps or (0, 0)
        next_step, last_step = schedule.start.step + 1, schedule.total_steps
        self._steps = range(max(first, next_step), min(last, last_step) + 1)
        if steps and not self._steps:
            left = f"steps {next_step} to {last_step} are left"
            logger.info(f"logging.profile_steps = [{first}, {last}] has no effect: {left}")
        if len(self._steps) > _MOST_STEPS:
            self._steps = self._steps[:_MOST_STEPS]
            logger.info(f"Profile: the first {_MOST_STEPS} steps alone, up to {self._steps[-1]}")
        self._is_gpu = world.device.type == "cuda"
        self._profile: profile | None = None
        self._last_profiled = 0  # the step after which the profile has ended
        self._seconds = Counter[str]()

    def step_begins(self, number: int) -> None:
        if self._profile or self._last_profiled or number not in self._steps:
            return
        activities = [ProfilerActivity.CPU]
        if self._is_gpu:
            activities.append(ProfilerActivity.CUDA)
            # Stacks of Python alone: C++ stacks would slow each allocation of a timed step.
            torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
        self._profile = profile(activities=activities)
        self._profile.start()

    def step_ended(self, ended: StepEnded) -> None:
        """Count the step's seconds; end the profile after the last one, or where the run stops."""
        if self._profile is None or self._last_profiled:
            return
        self._seconds.update(ended.seconds_by_phase)
        if ended.step.number == self._steps[-1] or ended.stats.must_stop:
            self._profile.stop()
            self._last_profiled = ended.step.number

    def between_steps(self) -> None:
        """Write the files of a profile that has ended, once."""
        # Only here, since it takes seconds: no clock runs, and no rank waits in the step.
        if self._profile is None or not self._last_profiled:
            return
        try:
            self._write(self._profile, self._last_profiled)
        except (OSError, RuntimeError) as error:  # torch raises either; the run goes on
            node_logger.warning(f"{self._folder}: no profile ({first_line(error)})")
        finally:
            if self._is_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
        self._profile = None

    def _write(self, profiled: profile, last: int) -> None:
        self._folder.mkdir(exist_ok=True)
        name = f"steps_{self._steps[0]:07d}_{last:07d}_rank_{self._world.rank:05d}"
        steps = last - self._steps[0] + 1
        means = {phase: total / steps for phase, total in self._seconds.items()}
        self._metrics.write(
            ProfileEntry(kind="profile", step=last, first_step=self._steps[0], seconds=means)
        )
        profiled.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
        by = "self_device_time_total" if self._is_gpu else "self_cpu_time_total"
        table = profiled.key_averages().table(sort_by=by, row_limit=_OPERATORS)
        (self._folder / f"{name}.txt").write_text(table, encoding="utf-8")
        if self._is_gpu:
            # A file for pytorch.org/memory_viz, in the only form that it reads.
            torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}_memory.pickle"))
        logger.info(f"Profiled: steps {self._steps[0]} to {last}, in {self._folder}")
