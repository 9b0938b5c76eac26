"""Write the model of a step where `export.every_steps` asks for it, and hand it to the command."""

from __future__ import annotations

from shardtune.checkpoint.export.step_models import StepModels
from shardtune.config import ExportConfig
from shardtune.data.schedule import Schedule
from shardtune.training.observers.export_command import ExportCommand
from shardtune.training.observers.observer import StepEnded, StepObserver


def is_due(step: int, schedule: Schedule, config: ExportConfig) -> bool:
    """Return whether the model of a step is due. The last step's is the final one, if any."""
    is_final = config.final and step == schedule.total_steps
    return schedule.is_due(step, config.every_steps) and not is_final


class StepExport(StepObserver):
    """Writes models between steps. `models`: None without `export.every_steps`."""

    def __init__(
        self,
        models: StepModels | None,
        command: ExportCommand,
        schedule: Schedule,
        config: ExportConfig,
    ) -> None:
        self._models, self._command = models, command
        self._schedule, self._config, self._step = schedule, config, 0

    def step_ended(self, ended: StepEnded) -> None:
        self._step = ended.step.number

    def between_steps(self) -> None:
        if is_due(self._step, self._schedule, self._config):
            self.write(self._step)
        self._command.poll()

    def write(self, step: int) -> None:
        """Write the model of a step, and start the command for it."""
        if not self._models:
            return
        if model := self._models.write(step):
            self._command.start(model, step)
        self._models.delete_old(step)
