"""transformers' Trainer on the weights and the rows of a run, with peft where it has adapters.

python -m distTest.gpu_check.trainer REQUEST RESULT.json

REQUEST is the JSON of speed.py: a folder with config.json, the seed of the weights, a file with the
tokens of each row in the order of the steps, and settings.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from shardtune.model.random_weights import draw_weights


class _Ends(TrainerCallback):
    """The time at the end of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter())


def main() -> None:
    request: dict[str, Any] = json.loads(sys.argv[1])
    rows = json.loads(Path(request["rows"]).read_text(encoding="utf-8"))
    # As in a run, nothing predicts the first token. Else the Trainer would count it.
    examples = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in rows]
    model, ends = _build(request), _Ends()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch,
            per_device_train_batch_size=request["micro_batch_size"],
            gradient_accumulation_steps=request["accumulation_steps"],
            num_train_epochs=1,
            train_sampling_strategy="sequential",
            learning_rate=request["lr"],
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            adam_beta2=0.95,
            bf16=True,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data: Any = examples  # a list will do, without the package datasets
        trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[ends])
        trainer.train()
    result = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "step_s": [end - begin for begin, end in pairwise(ends.seconds)],
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


def _build(request: dict[str, Any]) -> Any:
    """Build the model in bfloat16, with the weights that a run draws on its device."""
    config = AutoConfig.from_pretrained(request["model"])
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    device = torch.device("cuda", 0)
    with device:
        draw_weights(model, request["seed"], device)
    model.config.use_cache = False
    if request["lora_rank"] is None:
        return model
    from peft import LoraConfig, get_peft_model

    model.enable_input_require_grads()
    rank = request["lora_rank"]
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return get_peft_model(model, settings)


if __name__ == "__main__":
    main()
