"""The final model, in the layout that `from_pretrained` opens and that the source had."""

from __future__ import annotations

import json
import re
import shutil
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from .errors import Stopped
from .model import DTYPES
from .world import World


def export_model(
    model: PreTrainedModel,
    source_config: PreTrainedConfig,
    source: str,
    tokenizer: Any,
    dtype: str,
    out: Path,
    world: World,
) -> None:
    """Gather the weights tensor by tensor into rank 0's host memory, and write them to `out` in `dtype`,
    which may be `source`.

    Raises:
        Stopped: on every rank, if rank 0 could not write.
    """
    target = source_dtype(source_config) if dtype == "source" else DTYPES[dtype]
    weights = _gather(model, target, world)
    problem = None
    if world.is_main:
        try:
            _write(model, weights, source_config, source, tokenizer, target, out)
        except Exception as error:  # the others would wait for this rank
            if not isinstance(error, (OSError, SafetensorError)):
                traceback.print_exc()
            shutil.rmtree(_unfinished(out), ignore_errors=True)
            problem = f"the final model was not written to {out}: {error} - make room and run the same command again"
    problem = world.gather(problem)[0]
    if problem is not None:
        raise Stopped(problem)


def source_dtype(config: PreTrainedConfig) -> torch.dtype:
    """The dtype that the source's configuration names, else float32."""
    dtype = config.dtype
    return dtype if isinstance(dtype, torch.dtype) else DTYPES.get(str(dtype), torch.float32)


def _gather(model: PreTrainedModel, dtype: torch.dtype, world: World) -> dict[str, torch.Tensor]:
    """Whole tensors on rank 0's CPU, each tied weight once; nothing on the other ranks, which take part."""
    kept_exact = re.compile("|".join(map(re.escape, model._keep_in_fp32_modules_strict or ())) or "(?!)")
    tied = set(model.all_tied_weights_keys)
    weights = {}
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if world.is_main:
            cast = whole.is_floating_point() and not kept_exact.search(name)
            weights[name] = whole.to("cpu", dtype if cast else whole.dtype)
    return weights


def _write(
    model: PreTrainedModel,
    weights: dict[str, torch.Tensor],
    source_config: PreTrainedConfig,
    source: str,
    tokenizer: Any,
    dtype: torch.dtype,
    out: Path,
) -> None:
    """Everything goes to a hidden sibling that takes the name `out` when it is whole."""
    temporary = _unfinished(out)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    own_generation, model.generation_config = model.generation_config, GenerationConfig()
    model.save_pretrained(temporary, state_dict=weights)
    model.generation_config = own_generation
    config = source_config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_generation_config(source, temporary)
    tokenizer.save_pretrained(temporary)
    if out.exists():
        replaced = out.with_name(f".{out.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        out.rename(replaced)
        temporary.rename(out)
        shutil.rmtree(replaced)
    else:
        temporary.rename(out)


def _unfinished(out: Path) -> Path:
    return out.with_name(f".{out.name}.writing")


def _write_generation_config(source: str, out: Path) -> None:
    """The source's own, so that the model answers like the original; it may hold what transformers will not write."""
    target = out / "generation_config.json"
    target.unlink(missing_ok=True)
    own = Path(source) / target.name
    if own.is_file():
        shutil.copyfile(own, target)
        return
    try:
        GenerationConfig.from_pretrained(source).save_pretrained(out)
    except OSError:
        return  # the source has none, and transformers derives it from the configuration
