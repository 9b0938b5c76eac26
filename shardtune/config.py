"""The configuration: every section and key with its type, default and meaning.

The text below a field is its description in `shardtune config-schema` and docs/configuration.md.
The marks in `json_schema_extra` say whether a resume may change a key. config_io.py reads a
configuration. This module does not import torch.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.config import JsonDict, JsonValue
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema

LORA_LR = 1e-4  # ten times the default, as in Schulman et al., LoRA Without Regret (2025)
MAY_CHANGE: JsonDict = {"resume": "may change"}  # on a section: all of its keys


def _changeable(default: Any, **marks: JsonValue) -> Any:
    return Field(default=default, json_schema_extra=MAY_CHANGE | marks)


Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[Text, AfterValidator(os.path.expanduser)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=10**9)]
# YAML has lists and no tuples, so these types are not strict.
Betas = Annotated[tuple[FractionBelowOne, FractionBelowOne], Field(strict=False)]
Steps = Annotated[tuple[Count, Count], Field(strict=False)]
Names = Annotated[tuple[Text, ...], Field(strict=False, min_length=1)]
NamesOrNone = Annotated[tuple[Text, ...], Field(strict=False)]
Ends = Annotated[tuple[Literal["embed_tokens", "lm_head"], ...], Field(strict=False)]
LossOn = Literal["assistant", "last", "all"]
# The log has these names in lines of their own, and `Step.*Loss` must not match them.
EvalName = Annotated[str, Field(pattern=r"^(?!.*Step)[\w.-]+$")]


class Section(BaseModel):
    """A section of the file. Types are strict, but an integer may stand for a float."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        regex_engine="python-re",  # pydantic's default engine has no lookahead
    )


class RunConfig(Section):
    """The run itself."""

    dir: PathText = _changeable("runs/<config name>")
    """Directory of everything that the run writes."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1234
    """Seed of the data order, of dropout (seed + rank) and of random weights."""
    resume: PathText = _changeable("auto")
    """`auto`: newest checkpoint that every rank accepts; `never`: anew where a person starts it, a
    requeue goes on; or the directory of a checkpoint in which a run begins."""
    ignore_plan: bool = _changeable(False)
    """Start although the plan says that the run does not fit."""


class ModelConfig(Section):
    """The model, its dtypes and how it computes."""

    path: PathText = Field(examples=["zai-org/GLM-4.5-Air"])
    """Hub id or local directory of a causal language model."""
    new_tokens: NamesOrNone | dict[Literal["special", "plain"], NamesOrNone] = ()
    """Texts that become tokens, plain ones or `{special: [...], plain: [...]}`. Their rows are
    free ones, else the vocabulary grows to a multiple of 64; each is the mean of its old pieces'.
    """
    init: Literal["pretrained", "random"] = "pretrained"
    """`random`: draw the weights from the model's config alone, for rehearsals and benchmarks."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of stored parameters. `bfloat16`: stochastic rounding, bfloat16 moments."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of forward and backward. `auto`: bfloat16 where the device has it, else float32."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are reduced and accumulated."""
    activation_checkpointing: Literal["none", "selective", "full", "offload"] = _changeable("none")
    """Activations to compute again in the backward. `selective`: all but the costly ones;
    `offload`: as `full`, with the layers' inputs in host memory."""
    attention: Literal["auto", "sdpa", "eager"] = _changeable("auto")
    """`auto`: the fastest implementation on this device that keeps documents apart."""
    compile: bool | Literal["auto"] = _changeable("auto")
    """Compile each transformer block. `auto`: on GPUs where it works; `true`: or end the run."""


class TrainSource(Section):
    """One of several sources of training data."""

    path: PathText
    """A file, a directory or a hub dataset."""
    weight: NotNegative = 1.0
    """Passes over this source in an epoch. With 0.1, ten epochs use each record once."""
    name: Text | None = None
    """Its name in the log. `null`: the path without folders and suffix."""
    loss_on: LossOn | None = None
    """As `data.loss_on`, for this source. `null`: what `data.loss_on` says."""
    max_records: Count | None = None
    """Use no more than its first records."""
    template_options: dict[str, Any] = {}
    """As `data.template_options`, for this source; they go over those."""

    @property
    def label(self) -> str:
        path = Path(self.path)
        is_compressed = path.suffix in (".gz", ".zst")
        return self.name or (Path(path.stem).stem if is_compressed else path.stem)


TrainSources = Annotated[tuple[TrainSource, ...], Field(strict=False, min_length=1)]
EvalSets = Annotated[dict[EvalName, PathText], Field(min_length=1)]


RecordField = Literal[
    "messages",
    "conversations",
    "tools",
    "functions",
    "prompt",
    "completion",
    "text",
    "instruction",
    "input",
    "output",
    "history",
    "system",
    "system_prompt",
    "label",
    "kto_tag",
    "role",
    "chat_template_kwargs",
    "input_ids",
    "labels",
    "loss_mask",
    "loss_weights",
    "attention_mask",
    "position_ids",
    "messages.role",
    "messages.content",
]
RECORD_FIELDS: tuple[str, ...] = get_args(RecordField)


DropShare = Annotated[
    dict[Literal["drop"], Annotated[float, Field(gt=0, le=1)]], Field(min_length=1)
]


class DataConfig(Section):
    """The records and how they become rows of tokens."""

    train: PathText | TrainSources = Field(examples=["data/train.jsonl"])
    """A `.jsonl`, `.json`, `.csv` or `.parquet` file (`.jsonl.gz` or `.zst`, too), a directory of
    them, what `save_to_disk` wrote (`path:split`), or a hub dataset `org/name[:config][:split]`;
    or a list of sources, each with a path and a weight. A path begins at the working directory."""
    eval: PathText | EvalSets | None = None
    """Evaluation data, as one path, or several sets by name with a perplexity for each."""
    columns: dict[RecordField, Text | None] | None = None
    """Maps our field names to the data's; `null`: the data has no such field. `messages.role` and
    `messages.content` reach into turns."""
    roles: dict[Text, Literal["user", "assistant", "system", "tool", "developer"]] = {}
    """Maps the data's names of roles to ours, such as `{customer: user, agent: assistant}`."""
    chat_template: PathText | None = None
    """A file with a chat template in place of the tokenizer's; exported with the model."""
    template_options: dict[str, Any] = {}
    """Options for the chat template, such as `enable_thinking`. Those of a source, and a record's
    `chat_template_kwargs`, go over them."""
    eval_fraction: FractionBelowOne = 0.0
    """Without `data.eval`: fraction of `data.train` to evaluate on, by a hash of the record."""
    max_length: Annotated[int, Field(ge=2)] = 4096
    """Tokens in a row."""
    overflow: Literal["turns", "truncate", "split", "drop", "error"] = "turns"
    """A record longer than a row: keep the leading turns that fit whole, cut its end, train it in
    pieces, leave it out, or refuse the data."""
    loss_on: LossOn = "assistant"
    """Trained tokens: those of every assistant turn, of the last one, or all."""
    on_broken: Literal["error", "drop"] | DropShare = "error"
    """Broken records: refuse the data, or count them and leave them out, at most 1% of a source, or
    the share in `{drop: 0.05}`."""
    packing: bool = True
    """Put several records into a row. They never attend to one another."""

    @property
    def most_broken(self) -> float:
        """The share of a source that may be broken and is left out."""
        if isinstance(self.on_broken, dict):
            return self.on_broken["drop"]
        return 0.01 if self.on_broken == "drop" else 0.0

    @property
    def field_names(self) -> dict[str, str | None]:
        """`columns`, empty where there are none."""
        return {str(field): name for field, name in (self.columns or {}).items()}

    @property
    def train_sources(self) -> dict[str, TrainSource]:
        """The sources of the training data by their keys, `data.train` or `data.train.NAME`."""
        if isinstance(self.train, str):
            return {"data.train": TrainSource(path=self.train)}
        return {f"data.train.{source.label}": source for source in self.train}

    @property
    def eval_paths(self) -> dict[str, str]:
        """The paths of the evaluation sets by their keys, `data.eval` or `data.eval.NAME`."""
        if isinstance(self.eval, dict):
            return {f"data.eval.{name}": path for name, path in self.eval.items()}
        return {} if self.eval is None else {"data.eval": self.eval}

    @property
    def paths(self) -> dict[str, str]:
        """The path or hub name of every source by its key."""
        train = {key: source.path for key, source in self.train_sources.items()}
        return train | self.eval_paths


class ParallelConfig(Section, json_schema_extra=MAY_CHANGE):
    """How the model is divided over the ranks."""

    stages: Count = 1
    """Consecutive parts of the layers (a pipeline), each on as many consecutive ranks: whole nodes
    where there are several. Only layers' inputs travel between them. A step has at least as many
    micro-batches.
    """
    replicate: Count = 1
    """Copies of the sharded weights (HSDP; as many as ranks: DDP). 2 keeps gathers inside each of 2
    nodes. Gradients and the optimizer's state are divided over all ranks.
    """
    context: Count = 1
    """Consecutive ranks that share each row, for long rows (Ulysses sequence parallelism): a rank
    has a slice of its tokens, and in attention a share of the heads for all of them. It divides
    world size / `stages` and the model's heads.
    """
    tensor: Count = 1
    """Consecutive ranks of one node that share each row and the matrices of attention and dense
    MLPs (tensor and sequence parallelism), for few short rows of a large dense model: a rank has a
    slice of the row's tokens, and a part of each matrix for all of them. It divides world size /
    `stages` / `replicate` and the model's key heads.
    """
    expert: Count = 1
    """Ranks that share one set of experts, so that tokens travel to the experts instead of the
    experts' weights to the tokens. It divides world size / `stages` / `replicate` and the number of
    experts.
    """


class TrainConfig(Section, json_schema_extra=MAY_CHANGE):
    """Length and batch of the training."""

    epochs: Count = 3
    """Passes over the data."""
    max_steps: Count | None = None
    """Ends the run after this many optimizer steps, if the epochs do not end first."""
    micro_batch_size: Count = 1
    """Rows per rank in a forward."""
    gradient_accumulation_steps: Count = 1
    """Forwards and backwards per optimizer step."""
    max_grad_norm: Positive | None = 1.0
    """Clip gradients to this global norm. `null`: no clipping."""


class OptimizerConfig(Section):
    """The optimizer. Norms and biases have no weight decay."""

    offload: bool = _changeable(False)
    """Keep master weights, moments and gradients in host memory."""
    name: Literal["adamw", "adamw8bit"] = "adamw"
    """The optimizer's name. `adamw8bit`: moments of 8 bits."""
    lr: NotNegative = _changeable(1e-5)
    """Learning rate at the end of the warmup. 0 trains nothing."""
    betas: Betas = (0.9, 0.95)
    """Decay of the averages of gradients and of squared gradients."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.0
    """A step shrinks weight matrices by the learning rate times this."""


class LoraConfig(Section):
    """Low-rank adapters in place of full fine-tuning."""

    rank: Count | None = None
    """Rank of the adapters. `null`: full fine-tuning."""
    alpha: Positive | None = None
    """The adapters' output is scaled by `alpha` / `rank`. `null`: 2 x `rank`."""
    rslora: bool = False
    """Scale by `alpha` / the square root of `rank` instead (arXiv 2312.03732)."""
    dropout: FractionBelowOne = 0.0
    """Dropout of the adapters' input."""
    targets: Literal["all-linear", "attention", "experts"] | Text | Names = "all-linear"
    """Modules with adapters, by group or name. `all-linear`: attention, MLPs and experts; no
    router, no head."""
    rows: Literal["new", "none"] = "new"
    """Rows of the embedding and the head that train beside the factors: those of new tokens."""
    whole: Ends = ()
    """The embedding and the head, where they train whole beside the factors."""

    @property
    def scaled_by(self) -> float:
        """`alpha`, or its default."""
        assert self.rank
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def scaling(self) -> float:
        """The factor of the adapters' output."""
        assert self.rank
        return self.scaled_by / (self.rank**0.5 if self.rslora else self.rank)


class SchedulerConfig(Section, json_schema_extra=MAY_CHANGE):
    """The learning rate over the run."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after the warmup."""
    warmup_ratio: Fraction = 0.03
    """Fraction of all steps in which the learning rate rises."""
    min_lr_ratio: Fraction = 0.1
    """The last learning rate as a fraction of `optimizer.lr`."""


class EvalConfig(Section, json_schema_extra=MAY_CHANGE):
    """Evaluation, which needs `data.eval` or `data.eval_fraction`."""

    baseline: bool = True
    """Evaluate before the first update."""
    every_steps: CountOrZero = 0
    """Steps between evaluations. 0: only at the end."""
    keep_best: bool = False
    """Keep the weights of the lowest evaluation loss in `best/`."""
    samples: CountOrZero = 0
    """Held-out prompts that the model answers at each evaluation, the likeliest token each time."""
    sample_tokens: Count = 64
    """The most tokens of an answer."""


class CheckpointConfig(Section, json_schema_extra=MAY_CHANGE):
    """Checkpoints, from which a run resumes."""

    every_steps: CountOrZero = 500
    """Steps between checkpoints. 0: only at the end."""
    keep: Count = 2
    """Committed checkpoints to keep."""
    mode: Literal["async", "sync"] = "async"
    """`async`: train on while a copy in host memory is written; `sync`: wait for the disks."""
    mirror: bool | Literal["auto"] = "auto"
    """After each checkpoint a node also gets its neighbour's part, so that no dead disk takes it.
    `auto`: where each of several nodes has a disk of its own."""


class ExportConfig(Section, json_schema_extra=MAY_CHANGE):
    """The trained model as `from_pretrained` opens it."""

    final: bool = True
    """Write `model/` at the end."""
    dtype: Literal["source", "float32", "bfloat16", "float16"] = "source"
    """Dtype of the written model. `source`: as `model.path` (bfloat16 where quantised)."""
    merge: bool = True
    """With LoRA: write `model/`, with the adapters merged, beside `adapter/`."""
    every_steps: CountOrZero = 0
    """Write `models/step_0000500/` every so many steps, and after the last where `final` is
    false. 0: never."""
    keep: Count = 2
    """Models of steps to keep."""
    command: Text | None = None
    """A shell command that node 0 runs beside the training for each of these models and for
    `model/`: `SHARDTUNE_MODEL` and `SHARDTUNE_STEP` name it. A JSON object of numbers in its last
    line is kept as the model's score.
    """


class LoggingConfig(Section, json_schema_extra=MAY_CHANGE):
    """What the run reports, and where."""

    every_steps: Count = 1
    """Steps between two printed step lines."""
    tensorboard: bool = False
    """Write TensorBoard events into `tensorboard/`. Needs the package tensorboard."""
    wandb: Text | None = None
    """Weights & Biases project. Needs the package wandb."""
    profile_steps: Steps | None = None
    """First and last step to profile, into `profile/` of the run's directory."""


class DistributedConfig(Section, json_schema_extra=MAY_CHANGE):
    """Communication and its time limits."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """`auto`: NCCL with GPUs, else Gloo."""
    join_timeout_s: Seconds = 300.0
    """Seconds that nodes wait for one another at the start. `JOIN_TIMEOUT` overrides the file."""
    step_timeout_s: Seconds = 600.0
    """Seconds without progress, after which the run ends and names the rank that is behind."""
    save_timeout_s: Seconds = 3600.0
    """Seconds in which all ranks must have written a checkpoint."""


class Config(Section):
    """Configuration of a shardtune run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    logging: LoggingConfig = LoggingConfig()
    distributed: DistributedConfig = DistributedConfig()
    # The origin of each `section.key`: default, file, environment or command line.
    origins: SkipJsonSchema[dict[str, str]] = Field(default={}, exclude=True, repr=False)


SECTIONS: dict[str, type[Section]] = {
    name: cast(type[Section], field.annotation)
    for name, field in Config.model_fields.items()
    if name != "origins"
}
KEYS: dict[str, FieldInfo] = {
    f"{name}.{key}": field
    for name, section in SECTIONS.items()
    for key, field in section.model_fields.items()
}


def resume_may_change(key: str) -> bool:
    section = SECTIONS.get(key.partition(".")[0], Section).model_config.get("json_schema_extra")
    marks = KEYS[key].json_schema_extra if key in KEYS else {}
    return any("resume" in cast(JsonDict, each or {}) for each in (section, marks))
