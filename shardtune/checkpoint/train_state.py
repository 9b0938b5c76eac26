"""The tensors of a training state: sharded weights and moments, and each rank's random state."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

RANDOM = "random."


def training_state(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Every tensor of the training state by a lasting name, as the run holds it; tied weights appear once.

    Adam's state is created where its first step would, without taking that step: it would change the weights.
    """
    tied = model.all_tied_weights_keys
    tensors: dict[str, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=local(parameter).device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
    for name, parameter in model.named_parameters():
        name = tied.get(name, name)
        tensors[f"model.{name}"] = parameter
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value
    persistent = model.state_dict().keys()
    tensors |= {
        f"model.{name}": buffer for name, buffer in model.named_buffers() if name in persistent
    }
    return tensors


def random_state(rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The state of every random generator of this rank, by names that no other rank uses."""
    _, words, _ = (
        random.getstate()
    )  # the third is a half of a pair of normal numbers, which nothing here draws
    numpy_state = np.random.get_state(legacy=False)["state"]
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(
            np.append(numpy_state["key"], numpy_state["pos"]).astype(np.int64)
        ),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {f"{RANDOM}{generator}.{rank:05d}": state for generator, state in states.items()}


def restore_random_state(
    states: Mapping[str, torch.Tensor], rank: int, device: torch.device
) -> None:
    """Put back what `random_state` of this rank gave."""
    by_generator = {name.split(".")[1]: state for name, state in states.items()}
    torch.set_rng_state(by_generator["torch"])
    random.setstate((3, tuple(by_generator["python"].tolist()), None))
    key, position = (
        by_generator["numpy"][:-1].numpy().astype(np.uint32),
        int(by_generator["numpy"][-1]),
    )
    np.random.set_state(("MT19937", key, position, 0, 0.0))
    if device.type == "cuda" and "cuda" in by_generator:
        torch.cuda.set_rng_state(by_generator["cuda"], device)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
