"""Load a model's files sharded: transformers reads and converts, and each rank keeps its slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter
from transformers.distributed import DistributedConfig

from shardtune.distributed.tensors import to_local
from shardtune.errors import UserError
from shardtune.log import logger


class SliceConverter(WeightConverter):
    """Convert stored tensors as transformers does, also where the slice of a rank is empty.

    Files hold one tensor per expert. Each rank reads the experts of its slice and stacks them;
    transformers fails where there is none to stack.
    """

    __slots__ = ()

    def convert(self, layer_name: str, model: Any = None, *more: Any, **options: Any) -> Any:
        target = to_local(model.get_parameter_or_buffer(layer_name))
        if target.numel():
            return super().convert(layer_name, model, *more, **options)
        self.collected_tensors.clear()
        return {layer_name: torch.empty(target.shape, dtype=target.dtype)}


def load_sharded(
    skeleton: PreTrainedModel,
    path: str,
    device: torch.device,
    shard: Callable[[PreTrainedModel], None],
) -> PreTrainedModel:
    """Load the weights into a model like the skeleton that is sharded before they are read.

    transformers builds on meta, calls `maybe_distribute_model`, and then reads only its slices of
    all parameters that are DTensors. Its own version of that method unties tied embeddings and
    supports neither a world of one nor our dtypes.
    """
    model_class = type(skeleton)

    class Sharded(model_class):  # type: ignore[misc, valid-type]
        __module__ = model_class.__module__

        @classmethod
        def prepare_distribute_model(
            cls, distributed_config: Any, device_map: Any = None
        ) -> tuple[Any, Any, None]:
            return distributed_config, device, None

        @classmethod
        def maybe_distribute_model(cls, model: PreTrainedModel, *_: Any) -> PreTrainedModel:
            # from_pretrained ties only after reading; FSDP2 must see tied weights as one parameter.
            model.tie_weights()
            shard(model)
            return model

        @staticmethod
        def _load_pretrained_model(
            model: PreTrainedModel, states: Any, files: Any, load: Any
        ) -> Any:
            for conversion in load.weight_mapping:
                if type(conversion) is WeightConverter:
                    conversion.__class__ = SliceConverter
            return model_class._load_pretrained_model(model, states, files, load)

    # transformers finds its conversions by the class's name.
    Sharded.__name__ = Sharded.__qualname__ = model_class.__name__
    model, info = Sharded.from_pretrained(
        path,
        config=skeleton.config,
        dtype=skeleton.dtype,
        attn_implementation=skeleton.config._attn_implementation,
        distributed_config=DistributedConfig(),  # no parallelism of transformers' own
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    del model.config.distributed_config
    _require_all_weights(path, info)
    return cast(PreTrainedModel, model)


def _require_all_weights(path: str, info: Mapping[str, Any]) -> None:
    """Check what `from_pretrained` reports of its reading, and log what it left unread.

    Raises:
        UserError: the files lack tensors of the model, or have them in another shape.
    """
    misshapen = [
        f"{name}, {list(stored)}, not {list(built)}"
        for name, stored, built in info["mismatched_keys"]
    ]
    problems = [
        f"{path}: {problem} {min(names)} ({len(names)} in all) - fetch the model again, or correct "
        "its config.json"
        for problem, names in (
            ("the files lack the model's tensor", info["missing_keys"]),
            ("another shape than the model's has", misshapen),
        )
        if names
    ]
    if problems:
        raise UserError(*problems)
    if unexpected := sorted(info["unexpected_keys"]):
        logger.info(
            f"Not in the model, left unread: {unexpected[0]} ({len(unexpected)} tensors in all)"
        )
