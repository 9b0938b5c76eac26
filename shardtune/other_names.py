"""Names that keys have in HF Trainer, TRL, axolotl and LLaMA-Factory."""

_NAMES = {
    "run.dir": "output_dir logging_dir",
    "run.seed": "data_seed",
    "run.resume": "resume_from_checkpoint auto_resume_from_checkpoints",
    "model.path": "model_name model_name_or_path base_model",
    "model.compute_dtype": "bf16 fp16 dtype torch_dtype",
    "model.activation_checkpointing": "gradient_checkpointing",
    "model.attention": "attn_implementation flash_attn flash_attention",
    "model.compile": "torch_compile",
    "data.train": "datasets dataset dataset_name train_file",
    "data.eval": "val test_datasets eval_dataset validation_file",
    "data.eval_fraction": "val_size val_set_size",
    "data.chat_template": "template",
    "data.max_length": "sequence_len max_seq_len max_seq_length cutoff_len",
    "data.loss_on": "train_on_inputs train_on_prompt assistant_only_loss completion_only_loss",
    "data.packing": "sample_packing",
    "parallel.context": "context_parallel_size sequence_parallel_degree",
    "parallel.tensor": "tensor_parallel_size",
    "train.epochs": "num_train_epochs num_epochs",
    "train.micro_batch_size": "per_device_train_batch_size",
    "train.max_grad_norm": "gradient_clipping",
    "optimizer.lr": "learning_rate",
    "optimizer.name": "optim",
    "optimizer.betas": "adam_beta1 adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.offload": "offload_params offload_optimizer",
    "lora.rank": "r lora_r adapter finetuning_type use_peft",
    "lora.rslora": "use_rslora peft_use_rslora",
    "lora.targets": "target_modules lora_target_modules lora_target lora_target_linear",
    "scheduler.name": "lr_scheduler lr_scheduler_type",
    "scheduler.warmup_ratio": "warmup_steps num_warmup_steps",
    "scheduler.min_lr_ratio": "cosine_min_lr_ratio min_lr",
    "eval.every_steps": "eval_steps eval_strategy evaluation_strategy",
    "eval.keep_best": "load_best_model_at_end",
    "checkpoint.every_steps": "save_steps save_strategy",
    "checkpoint.keep": "save_total_limit",
    "logging.every_steps": "logging_steps",
    "logging.wandb": "report_to wandb_project",
}
KEY_OF = {name: key for key, names in _NAMES.items() for name in names.split()}
_PAGE = """\
## Names in other tools

A name on the right is refused with the key on its left and this key's meaning: `warmup_steps`
counts steps, and `scheduler.warmup_ratio` is a fraction of them. HF Trainer has four other
defaults: `adam_beta2` is 0.999, the rate falls to 0, its first step of a warm-up has a rate of 0,
and nothing is packed. Losses can be compared with a constant rate in both, and here with
`optimizer.betas=[0.9,0.999] scheduler.name=constant scheduler.warmup_ratio=0 data.packing=false`.

| key | HF Trainer, TRL, axolotl, LLaMA-Factory |
|---|---|
"""


def markdown() -> str:
    rows = (f"| `{key}` | {names.replace(' ', ', ')} |\n" for key, names in _NAMES.items())
    return _PAGE + "".join(rows)
