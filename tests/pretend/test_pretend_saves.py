"""Saves of a GPU's tensors, whose copies land as late as a GPU may make them."""

import threading
from dataclasses import replace
from pathlib import Path

import torch
from helpers.pretended import needs_compiler, on_gpus
from helpers.thread_ranks import Tiny, TinyConfig, optimizer_of, thread_worlds
from safetensors.torch import load_file

from shardtune.checkpoint import Saver
from shardtune.checkpoint.run_dir import RunDir
from shardtune.checkpoint.train_state import training_state
from shardtune.config import CheckpointConfig

pytestmark = needs_compiler


def test_a_save_has_the_weights_of_its_step_though_training_goes_on(tmp_path):
    done = on_gpus(1, _save_and_update, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def _save_and_update() -> None:
    world = replace(thread_worlds(1)[0], device=torch.device("cuda"))
    model = Tiny(TinyConfig()).cuda()
    optimizer = optimizer_of(model)  # it waits for no copy
    config = CheckpointConfig(mode="async")
    saver = Saver(RunDir(Path("run"), [0], None), config, 60, model, optimizer, {}, world)
    for step in (1, 2):  # the second one finds the first one's copies
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        state = training_state(model, optimizer)
        expected = {name: tensor.detach().clone() for name, tensor in state.items()}
        # The last change before the save may itself be under way.
        weight = torch.full((3, 4), float(step)).pin_memory()
        expected["model.linear.weight"] = weight
        model.linear.weight.data.copy_(weight, non_blocking=True)
        updated = threading.Event()
        saver.save({"step": step, "config": {}}, lambda updated=updated: updated.wait(240))
        optimizer.step()
        updated.set()
        saver.finish()
        saved = load_file(f"run/checkpoints/checkpoint_{step:07d}/rank_00000.safetensors")
        for name, tensor in expected.items():
            assert torch.equal(saved[name], tensor.cpu()), (step, name)
