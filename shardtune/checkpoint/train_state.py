"""The tensors of a training state: sharded weights and moments, and each rank's random state."""

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from shardtune.model.parts import is_factor

MODEL, RANDOM = "model.", "random."


def training_state(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return every tensor of the training state by a lasting name; tied weights appear once.

    With adapters only what trains is saved: the frozen weights are in the files of `model.path`.
    The optimizer's state is created here, because its first step would change the weights.
    """
    tied = model.all_tied_weights_keys
    tensors: dict[str, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if parameter not in optimizer.state:
                optimizer.state[parameter] = cast(Any, optimizer).new_state(parameter)
            for key, value in optimizer.state[parameter].items():
                tensors[f"optimizer.{key}.{tied.get(name, name)}"] = value
    return tensors | model_state(model, masters_by_name(optimizer))


def masters_by_name(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the masters in host memory, which the optimizer updates instead of the model's
    weights."""
    host = cast(Any, optimizer).host
    return {
        name: host.masters[parameter]
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        if host and parameter in host.masters
    }


def model_state(
    model: PreTrainedModel, masters: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that are saved, by their names in `training_state`.

    They have the order of the modules, so that the stages together have the whole model's order.
    `masters` replace parameters of the same name.
    """
    tied, persistent = model.all_tied_weights_keys, model.state_dict().keys()
    parameters: dict[str, torch.Tensor] = {
        tied.get(name, name): masters.get(name, tensor) for name, tensor in model.named_parameters()
    }
    if any(map(is_factor, parameters)):
        trained = {tied.get(name, name) for name, p in model.named_parameters() if p.requires_grad}
        return {f"{MODEL}{name}": t for name, t in parameters.items() if name in trained}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    tensors, places = parameters | buffers, {name: n for n, name in enumerate(persistent)}
    return {f"{MODEL}{name}": tensors[name] for name in sorted(tensors, key=places.__getitem__)}


def model_kinds(model: PreTrainedModel) -> dict[str, tuple[torch.dtype, list[int]]]:
    return {name: (t.dtype, list(t.shape)) for name, t in model_state(model).items()}


def random_state(rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of this rank's random generators, by names that include the rank."""
    # The third value caches a normal number; nothing here draws normal numbers with it.
    _, words, _ = random.getstate()
    numpy_state = np.random.get_state(legacy=False)["state"]
    numpy_words = np.append(numpy_state["key"], numpy_state["pos"]).astype(np.int64)
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(numpy_words),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {f"{RANDOM}{generator}.{rank:05d}": state for generator, state in states.items()}


def restore_random_state(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    by_generator = {name.split(".")[1]: state for name, state in states.items()}
    torch.set_rng_state(by_generator["torch"])
    random.setstate((3, tuple(by_generator["python"].tolist()), None))
    *key, position = by_generator["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(key, np.uint32), position, 0, 0.0))
    if device.type == "cuda" and "cuda" in by_generator:
        torch.cuda.set_rng_state(by_generator["cuda"], device)
