"""metrics.jsonl of a run: each line is an object of one of these kinds.

`python -m shardtune.metrics_schema` prints docs/metrics.md. The text below a field is its meaning
there. This module does not import torch.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NotRequired, get_args, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

Number = float | None  # None stands for NaN, infinity and what is not known
Count = Annotated[int, Field(ge=0, le=10**18)]
_described = with_config(ConfigDict(use_attribute_docstrings=True))


class _Entry(TypedDict):
    time: NotRequired[str]  # set when it is written


@_described
class StepEntry(_Entry):
    """An optimizer step. After a resume the file holds each step once."""

    kind: Literal["step"]
    step: Count
    """Its number, from 1."""
    epoch: Count
    """From 0."""
    loss: Number
    """The sum of the negative log-likelihoods of all trained tokens of the global batch, divided by
    their number, in nats."""
    grad_norm: Number
    """The norm of all gradients together, before clipping."""
    lr: float
    """The learning rate."""
    tokens: Count
    """All real tokens of the global batch, without padding."""
    trained_tokens: Count
    """The tokens that the loss counts."""
    tokens_per_second: Number
    """`tokens` / `seconds`."""
    seconds: Number
    """Wall time since the previous step ended, or the loop began: waiting for data included,
    evaluation and saves left out."""
    mfu: Number
    """The model's FLOPs per second as a share of the devices' peak; null where that is unknown."""
    memory_bytes: Count
    """The most memory that any rank has held so far: of its GPU, or of its process."""
    data_seconds: Number
    """The part of `seconds` in which the rank that waited longest waited for batches."""
    reserved_memory_bytes: Count | None
    """The most that the allocator of any rank has taken from its GPU so far, free pieces included;
    null on CPUs."""


@_described
class EvalEntry(_Entry):
    """An evaluation of all evaluation data. An entry for each named set follows."""

    kind: Literal["eval"]
    step: Count
    """The step after which it was made; 0: the baseline."""
    loss: Number
    """The negative log-likelihood of a trained token, in nats, each token counted once."""
    perplexity: Number
    """exp of `loss`."""
    tokens: Count
    """The tokens that the loss counts."""
    set: NotRequired[str]
    """The name of the set; missing where it is of all data."""


@_described
class SampleEntry(_Entry):
    """With `eval.samples`: the model's answer to a held-out prompt."""

    kind: Literal["sample"]
    step: Count
    """The step after which it was made; 0: the baseline."""
    prompt: str
    """All tokens before the answer, with the template's marks."""
    answer: str
    """The likeliest token each time, `eval.sample_tokens` at most."""
    reference: str
    """The record's own answer."""
    is_cut: NotRequired[bool]
    """Whether the answer was cut off before its end; missing where it was not."""


@_described
class ScoreEntry(_Entry):
    """With `export.command`: the numbers in the last line of the command, or that it failed."""

    kind: Literal["score"]
    step: Count
    """The step of the model."""
    model: str
    """Its folder within run.dir."""
    scores: dict[str, Number]
    """Each number by its name; none where the command failed."""
    seconds: Number
    """How long the command took."""
    exit_code: NotRequired[int]
    """The command's exit code, or minus the signal that ended it; missing where it is 0."""


@_described
class BestEntry(_Entry):
    """With `eval.keep_best`: the evaluation with the lowest loss so far, whose model is kept."""

    kind: Literal["best"]
    step: Count
    """The step of that model."""
    loss: Number
    """As in `eval`."""
    perplexity: Number
    """As in `eval`."""
    tokens: NotRequired[Count]
    """As in `eval`; missing where a resume has kept a model that was there already."""
    seconds: Number
    """The time of writing `best/`, in which training waited."""


@_described
class LayerBalance(TypedDict):
    layer: str
    """The name of the module."""
    tokens: list[Count]
    """How many tokens chose each expert."""
    entropy: float
    """-sum(p log p) / log(experts) of these choices: 1 where all experts have the same number of
    tokens, 0 where one has all."""
    without_tokens: Count
    """The number of experts that no token chose."""
    rank_imbalance: NotRequired[float]
    """With `parallel.expert`: the tokens of the fullest rank as a multiple of the mean of the ranks
    that share the experts, in the worst group; memory and time follow it."""


@_described
class ExpertsEntry(_Entry):
    """With stacked experts, every `logging.every_steps`: how evenly a step used them, in all its
    tokens, on all ranks."""

    kind: Literal["experts"]
    step: Count
    """The step."""
    layers: list[LayerBalance]
    """One for each layer with experts."""


@_described
class RanksEntry(_Entry):
    """The rank that other ranks waited for, every 10 steps of a run with several ranks."""

    kind: Literal["ranks"]
    step: Count
    """The last of the 10 steps."""
    slowest_rank: Count
    """The rank whose own time, without waiting, was the longest."""
    host: str
    """Its host."""
    ratio: float
    """Its own time as a multiple of the median rank's."""
    phase: str
    """The phase of a step in which it was furthest above the median."""
    seconds: dict[str, float]
    """Its mean seconds a step in each phase, without waiting, and in `waiting` for collectives."""


@_described
class SaveEntry(_Entry):
    """A save that has ended: its checkpoint was committed, or `problem` says why not."""

    kind: Literal["save"]
    step: Count
    """The step of the checkpoint; training may be some steps further by then."""
    seconds: Number
    """The time until it was committed, or failed."""
    stall_seconds: Number
    """The part of it in which training waited."""
    problem: str | None
    """The error of a save that failed; null where its checkpoint was committed."""


@_described
class RefusedEntry(_Entry):
    """A step that was not taken, and ended the run: its loss or gradient norm is not finite."""

    kind: Literal["refused"]
    step: Count
    """The number that the step would have had."""
    loss: Number
    """Its loss; null where it is not finite."""
    grad_norm: Number
    """Its gradient norm; null where it is not finite."""


@_described
class ProfileEntry(_Entry):
    """With `logging.profile_steps`: how the profiled steps of rank 0 divide."""

    kind: Literal["profile"]
    step: Count
    """The last profiled step."""
    first_step: Count
    """The first one."""
    seconds: dict[str, float]
    """The mean seconds a step in each phase, without waiting, and in `waiting` for collectives."""


@_described
class Change(TypedDict):
    key: str
    """The key, or what else may change, such as the number of ranks."""
    old: Any
    """The value of the checkpoint."""
    new: Any
    """The value from now on."""


@_described
class StartEntry(_Entry):
    """A start of the run."""

    kind: Literal["start"]
    step: Count
    """The step of the checkpoint that it resumes from; 0: it begins anew."""
    total_steps: Count
    """The last step of the whole run."""
    world_size: Count
    """The number of ranks."""
    data_ranks: Count
    """The ranks with rows of their own: `world_size` / `parallel.stages` / `parallel.context` /
    `parallel.tensor`.
    """
    micro_batch_size: Count
    """The rows of a data rank in a forward."""
    gradient_accumulation_steps: Count
    """The forwards of a step."""
    epoch: Count
    """The epoch of its first step, from 0."""
    row: Count
    """How many rows of that epoch are done before it."""
    row_cost: dict[str, Count]
    """The FLOPs of a token outside of attention, of a trained one more, and of a pair in attention:
    by them the rows of a step are divided among the data ranks."""
    date: str
    """The date for chat templates that print one."""
    data_key: str
    """The digest of all tokens and of which are trained."""
    device: str
    """`cuda` or `cpu`."""
    versions: dict[str, str]
    """The versions of torch and transformers."""
    changes: list[Change]
    """The settings that differ from the checkpoint's."""
    data: list[str]
    """The lines of the log about the data: how many records were cut, joined, dropped or are there
    twice, and which files of a directory were ignored."""


@_described
class PlanEntry(_Entry):
    """The plan: at the start, and at the end again with what was measured."""

    kind: Literal["plan"]
    step: Count
    """The step that the run begins from, or its last one."""
    memory_bytes: Count
    """The memory that a rank may take, of the rank that has the least."""
    predicted_peak_bytes: Count
    """The most memory that the fullest rank was to hold."""
    source: str
    """`simulated step`, or `bound from shapes`: then it holds that memory at most."""
    predicted_step_seconds: Number
    """The least time of a step; null where it is not known."""
    bound_by: str | None
    """What takes that time; null where it is not known."""
    peak_bytes: NotRequired[Count]
    """At the end: the most memory that a rank has held."""
    step_seconds: NotRequired[Number]
    """At the end: the median time of a step, without the first one."""


Entry = (
    StartEntry
    | PlanEntry
    | StepEntry
    | EvalEntry
    | SampleEntry
    | ScoreEntry
    | BestEntry
    | SaveEntry
    | RefusedEntry
    | RanksEntry
    | ExpertsEntry
    | ProfileEntry
)
KINDS: dict[str, Any] = {
    get_args(get_type_hints(entry)["kind"])[0]: entry for entry in get_args(Entry)
}


_INTRODUCTION = """\
# metrics.jsonl

A run appends an object a line to `metrics.jsonl` in its `run.dir`, numbers in full precision. Each
object has `kind`, `step` and `time`, ISO 8601 in UTC. Null stands for NaN, infinity and what is not
known. `python -m shardtune.metrics_schema` prints this page.
"""


def markdown() -> str:
    """Return docs/metrics.md: a table per kind."""
    lines = [_INTRODUCTION]
    for kind, entry in KINDS.items():
        schema = TypeAdapter(entry).json_schema()
        lines += [f"## {kind}", "", " ".join(schema["description"].split()), ""]
        lines += ["| field | meaning |", "|---|---|", *_rows(schema, schema.get("$defs", {})), ""]
    return "\n".join(lines)


def _rows(schema: Mapping[str, Any], parts: Mapping[str, Any], within: str = "") -> Iterator[str]:
    for name, field in schema["properties"].items():
        if meaning := field.get("description"):
            yield f"| `{within}{name}` | {' '.join(meaning.split())} |"
        if reference := field.get("items", {}).get("$ref"):
            yield from _rows(parts[reference.rpartition("/")[2]], parts, f"{within}{name}[].")


if __name__ == "__main__":
    print(markdown(), end="")
