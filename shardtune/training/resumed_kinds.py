"""Says after the first step what this run computes otherwise than the one that it resumes."""

from __future__ import annotations

import torch

from shardtune.checkpoint import resume_rules
from shardtune.training.context import Run
from shardtune.training.observer import StepEnded, StepObserver
from shardtune.training.optim import kinds_of_run


class ResumedKinds(StepObserver):
    """Compares what is compiled, which shows in use, with what the checkpoint says."""

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer) -> None:
        self._resumed, self._optimizer, self._world = run.resumed, optimizer, run.world

    def step_ended(self, _: StepEnded) -> None:
        if self._resumed:
            resume_rules.log_kinds(self._resumed, kinds_of_run(self._optimizer, self._world))
            self._resumed = None
