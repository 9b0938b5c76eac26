"""Train once with a peer, by its public API at its best setting, in the peers' environment.

python -m benchmarks.peers OPTIONS RESULT.json, the options as `sides.Job.run` writes them

All of the data is one optimizer step, so that every side has the same batch, however it orders and
packs. Writes the fields of `sides.Side`.
"""

import gc
import json
import os
import re
import sys
import tempfile
import time
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from distTest.workloads.chats import MARKED_TEMPLATE

WHOLE_EPOCH = 1 << 20  # micro-batches: more than any epoch has, so that one step takes all of them


class Watch(TrainerCallback):
    """Notes when each optimizer step ends, in wall and CPU time, and its loss."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu_ends: list[float] = []  # CPU seconds of this process
        self.losses: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())
        self.cpu_ends.append(time.process_time())

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def main() -> None:
    options, out = Namespace(**json.loads(sys.argv[1])), Path(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.chat_template = MARKED_TEMPLATE
    lines = Path(options.chats).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    watch = Watch()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = build(options, tokenizer, records, watch, scratch)
        counts = count_tokens(trainer)
        gc.collect()
        trainer.train()
    result = {
        "losses": watch.losses,
        # Without the first step, which also sets things up.
        "seconds": [end - start for start, end in pairwise(watch.ends)],
        "cpu_seconds": [end - start for start, end in pairwise(watch.cpu_ends)],
        "memory_bytes": peak_bytes(),
        **counts,
    }
    if dist.is_initialized():
        per_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(per_rank, {**counts, "memory_bytes": result["memory_bytes"]})
        result |= {key: sum(rank[key] for rank in per_rank) for key in counts}
        result["memory_bytes"] = max(rank["memory_bytes"] for rank in per_rank)
    if not dist.is_initialized() or dist.get_rank() == 0:
        out.write_text(json.dumps(result), encoding="utf-8")
    if dist.is_initialized():
        dist.barrier()
        os._exit(0)  # gloo's threads abort a process that exits normally


def build(
    options: Namespace, tokenizer: Any, records: list[dict[str, Any]], watch: Watch, scratch: str
) -> Any:
    shared = {
        "output_dir": scratch,
        "num_train_epochs": options.steps,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": WHOLE_EPOCH,
        "learning_rate": options.lr,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": options.dtype == "bfloat16",
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 1234,
    }
    if options.side == "trl_packed":
        from trl import SFTConfig, SFTTrainer

        lengths = {"packing": True, "packing_strategy": "bfd", "max_length": options.max_length}
        return SFTTrainer(
            model=load(options),
            args=SFTConfig(**shared, **lengths, assistant_only_loss=True),
            train_dataset=Dataset.from_list(records),
            processing_class=tokenizer,
            callbacks=[watch],
        )
    if options.side == "transformers_fsdp":
        shared["ddp_backend"] = "gloo"
    settings = TrainingArguments(**shared)  # it joins the group that `load` asks for
    tokenized = [tokenize(record, tokenizer, options.max_length) for record in records]
    return Trainer(
        model=load(options),
        args=settings,
        train_dataset=Dataset.from_list(tokenized),
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
        callbacks=[watch],
    )


def load(options: Namespace) -> Any:
    more: dict[str, Any] = {}
    if options.side == "transformers_fsdp":
        from transformers.distributed import DistributedConfig

        more["distributed_config"] = DistributedConfig(fsdp_size=dist.get_world_size())
    return AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation="sdpa", **more
    )


def tokenize(record: dict[str, Any], tokenizer: Any, max_length: int) -> dict[str, list[int]]:
    """Tokenize a chat as the documentation of chat templates does, for a trainer without chats."""
    encoded = tokenizer.apply_chat_template(
        record["messages"],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        truncation=True,
        max_length=max_length,
    )
    ids = encoded["input_ids"]
    labels = [
        token if mask else -100 for token, mask in zip(ids, encoded["assistant_masks"], strict=True)
    ]
    return {"input_ids": ids, "labels": labels}


def peak_bytes() -> int:
    """Return the peak of this process, by the counter that shardtune reads."""
    # Not ru_maxrss, which a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024


def count_tokens(trainer: Any) -> dict[str, int]:
    """Count the tokens in the batches of one step of this rank."""
    counts = {"tokens": 0, "trained_tokens": 0}
    for batch in trainer.get_train_dataloader():
        mask = batch.get("attention_mask")
        counts["tokens"] += int(mask.sum()) if mask is not None else batch["input_ids"].numel()
        counts["trained_tokens"] += int((batch["labels"][:, 1:] != -100).sum())
    return counts


if __name__ == "__main__":
    main()
