"""Small configurations, and every key's default as the contract with users has it."""

import os
from pathlib import Path
from typing import Any

import yaml

from shardtune.config import Config
from shardtune.config_io import load_config, to_dict

MINIMAL = "model: {path: m}\ndata: {train: d.jsonl}\n"
DEFAULTS: dict[str, dict[str, Any]] = yaml.safe_load("""
run: {dir: runs/small, seed: 1234, resume: auto, ignore_plan: false}
model: {path: m, new_tokens: [], init: pretrained, master_dtype: float32, compute_dtype: auto,
  reduce_dtype: float32, activation_checkpointing: none, attention: auto, compile: auto}
data: {train: d.jsonl, eval: null, columns: null, roles: {}, chat_template: null,
  template_options: {},
  eval_fraction: 0.0, max_length: 4096, overflow: turns, loss_on: assistant, on_broken: error,
  packing: true}
parallel: {stages: 1, replicate: 1, context: 1, tensor: 1, expert: 1}
train: {epochs: 3, max_steps: null, micro_batch_size: 1, gradient_accumulation_steps: 1,
  max_grad_norm: 1.0}
optimizer: {offload: false, name: adamw, lr: 0.00001, betas: [0.9, 0.95], eps: 0.00000001,
  weight_decay: 0.0}
lora: {rank: null, alpha: null, rslora: false, dropout: 0.0, targets: all-linear,
       rows: new, whole: []}
scheduler: {name: cosine, warmup_ratio: 0.03, min_lr_ratio: 0.1}
eval: {baseline: true, every_steps: 0, keep_best: false, samples: 0, sample_tokens: 64}
checkpoint: {every_steps: 500, keep: 2, mode: async, mirror: auto}
export: {final: true, dtype: source, merge: true, every_steps: 0, keep: 2, command: null}
logging: {every_steps: 1, tensorboard: false, wandb: null, profile_steps: null}
distributed: {backend: auto, join_timeout_s: 300, step_timeout_s: 600, save_timeout_s: 3600}
""")


def load(
    folder: Path, *assignments: str, text: str = MINIMAL, environ: dict[str, str] | None = None
) -> Config:
    file = folder / "small.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, assignments, environ or {})


def configured(*assignments: str) -> Config:
    """Return the configuration of a model and data that are not read."""
    return load_config(
        Path(os.devnull), ["model.path=unread", "data.train=unread", *assignments], {}
    )


def value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return to_dict(config)[section][name]
