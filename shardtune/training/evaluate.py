"""Perplexity over the evaluation set, and answers to some of its prompts, on any mesh of ranks.

Each trained token counts once.
"""

import math
import time
from collections.abc import Iterable, Sequence
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from shardtune.data.batch import Batch, build_batch
from shardtune.data.chat_encoder import ChatEncoder
from shardtune.data.dataset import PreparedData, TokenDataset, build_encoder
from shardtune.data.order import lay_out_rows
from shardtune.data.schedule import Schedule, assign_rows
from shardtune.distributed.progress import Phase
from shardtune.distributed.signals import StopRequest
from shardtune.garbage_collection import collect_if_due
from shardtune.log import logger, quoted
from shardtune.metrics_schema import EvalEntry, SampleEntry
from shardtune.model.fsdp_groups import forward_only
from shardtune.model.loss import Measure, predicted_logits
from shardtune.run_files import read_entries
from shardtune.training.context import TrainContext
from shardtune.training.run import Run


class Prompt(NamedTuple):
    """The token ids before a sequence's first trained token, and those that are trained there."""

    tokens: list[int]
    reference: list[int]


def choose_prompts(sets: Iterable[TokenDataset], count: int) -> list[Prompt]:
    """Return the prompts of the first records, one of each set in turn."""
    in_turn = chain.from_iterable(zip_longest(*map(_prompts, sets)))
    return list(islice(filter(None, in_turn), count))


def _prompts(dataset: TokenDataset) -> Iterable[Prompt]:
    for number in np.flatnonzero(dataset.begins_record):
        tokens, trained = dataset[int(number)]
        begin = int((trained > 0).argmax())
        end = begin + int((np.append(trained[begin:], 0) > 0).argmin())
        if begin < 2:  # a text has no prompt: the model continues its first half
            begin = len(tokens) // 2
        if trained.any() and 0 < begin < end:
            yield Prompt(tokens[:begin].tolist(), tokens[begin:end].tolist())


class UnfinishedTexts:
    """Texts as a data set whose sequences predict the next token of each.

    Behind a text stands its number, as the target of the prediction: causal attention does not look
    at it.
    """

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = texts
        self.lengths = np.array([len(text) + 1 for text in texts], np.int32)

    def __getitem__(self, i: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return token ids int64 [length] and trained flags bool [length]."""
        tokens = np.array([*self._texts[i], i], np.int64)
        return tokens, np.arange(len(tokens)) == len(tokens) - 1


def in_rows(
    texts: Sequence[Sequence[int]], numbers: Sequence[int], most_tokens: int, is_flat: bool
) -> list[list[int]]:
    """Return the numbers of texts that one forward takes together, each with its next token."""
    rows: list[list[int]] = []
    room = 0
    for number in numbers:
        needed = len(texts[number]) + 1
        if needed > room:
            rows.append([])
            room = most_tokens if is_flat else needed
        rows[-1].append(number)
        room -= needed
    return rows


# Each metric sums something over the trained tokens of a batch, in a forward of its own. Its mean
# (where tokens have weights: over their sum) goes into the log and into metrics.jsonl. None: the
# loss that the steps minimise.
METRICS: dict[str, Measure | None] = {"loss": None}


def evaluate(context: TrainContext, step: int, stop: StopRequest | None = None) -> bool:
    """Log the perplexity over all evaluation data, then of each named set. Collective.

    Step 0 is the baseline. Return False on every rank, and log nothing, if a signal on any rank cut
    the evaluation short.
    """
    context.run.world.progress.enter(Phase.EVALUATING, step)
    sums: dict[str, tuple[np.ndarray, int, float]] = {}
    for name, dataset in context.data.eval.items():
        of_set = _sums(context, dataset, stop)
        if of_set is None:
            return False
        n_trained, weight = dataset.trained_counts.sum(), dataset.trained_weights.sum()
        sums[name] = of_set.cpu().numpy(), int(n_trained), float(weight)
    of_sets, token_counts, weights = zip(*sums.values(), strict=True)
    entries = [_entry(step, np.sum(of_sets, 0), sum(token_counts), sum(weights))]
    entries += [_entry(step, *sums[name]) | {"set": name} for name in sums if name]
    label, at_step = ("Baseline", "") if step == 0 else ("Eval", f" | Step: {step}")
    for entry in entries:
        # A set's line must not match the patterns by which others find steps and the baseline.
        what = f"Perplexity of {entry['set']}" if "set" in entry else f"{label} Perplexity"
        logger.info(
            f"{what}: {entry['perplexity']:.4f} | Loss: {entry['loss']:.4f} | "
            f"Tokens: {entry['tokens']}{at_step}{_others(entry)}"
        )
    context.metrics.write(*entries)
    if context.run.config.eval.samples:
        answer_prompts(context, step, stop)
    if context.best and (best := context.best.offer(entries[0])):
        context.metrics.write(best)
    return True


def _entry(step: int, sums: np.ndarray, tokens: int, weight: float) -> EvalEntry:
    means: Any = dict(zip(METRICS, (sums / weight).tolist(), strict=True))
    loss = means.pop("loss")  # nats per token
    perplexity = math.inf if loss >= 709 else math.exp(loss)  # exp overflows a float there
    entry = EvalEntry(kind="eval", step=step, loss=loss, perplexity=perplexity, tokens=tokens)
    return entry | means


def _others(entry: EvalEntry) -> str:
    names = (name for name in METRICS if name != "loss")
    return "".join(f" | {name.capitalize()}: {dict(entry)[name]:.4f}" for name in names)


def _sums(
    context: TrainContext, dataset: TokenDataset, stop: StopRequest | None
) -> torch.Tensor | None:
    """Return each metric over `dataset`, summed over all ranks: float64 [metrics].

    Return None on every rank if a rank has received a signal.
    """
    config, world, model = context.run.config, context.run.world, context.model
    # Rows are the same at every evaluation, so that two losses differ by the weights alone.
    rows = lay_out_rows(
        dataset.lengths, config.data.max_length, config.data.packing, seed=0, epoch=0
    )
    costs = context.row_cost.per_row(
        rows, dataset.lengths[rows.members], dataset.trained_counts[rows.members]
    )
    micro_batches = assign_rows(
        rows, costs, world.data_rank, world.layout.data_ranks, world.layout.micro_batch_size
    )
    sums = torch.zeros(len(METRICS), dtype=torch.float64, device=world.device)
    with forward_only(model):
        for number, sequences in enumerate(micro_batches):
            batch = build_batch(dataset, sequences, context.is_flat, world.share)
            batch = batch.to(world.device)
            sums += torch.stack([context.stage.forward(batch, m) for m in METRICS.values()])
            collect_if_due()
            # A rank that stopped alone would leave other ranks waiting in a collective: so all ask
            # for signals after the same micro-batch. To ask drains a pipeline: stages ask seldom.
            asks = stop and number % (4 * world.layout.stages - 3) == 0
            if stop and asks and world.all_reduce_max(stop.received is not None)[0]:
                context.stage.finish()
                return None
        context.stage.finish()
    world.progress.meet()
    with world.progress.waiting():
        dist.all_reduce(sums)
    return sums


def answer_prompts(context: TrainContext, step: int, stop: StopRequest | None = None) -> None:
    """Let the model answer held-out prompts, and log each answer. Collective.

    A signal on any rank leaves them out.
    """
    run, world, began = context.run, context.run.world, time.perf_counter()
    prompts = choose_prompts(context.data.eval.values(), run.config.eval.samples)
    encoders: list[ChatEncoder] = []

    def stop_token_ids() -> list[int]:
        encoders.append(build_encoder(run.config.model, run.config.data, run.date))
        return encoders[0].stop_token_ids

    ends = world.on_rank0(stop_token_ids)
    with forward_only(context.model):
        answers = _greedy(context, prompts, ends, stop)
    if answers is None or not world.is_main:
        return
    decode = encoders[0].tokenizer.decode
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), start=1):
        is_cut = answer[-1] not in ends
        texts = (
            decode(prompt.tokens),
            decode(answer if is_cut else answer[:-1], skip_special_tokens=True),
            decode(prompt.reference, skip_special_tokens=True),
        )
        entry = SampleEntry(
            kind="sample", step=step, prompt=texts[0], answer=texts[1], reference=texts[2]
        )
        context.metrics.write(entry | {"is_cut": True} if is_cut else entry)
        asked, said, expected = map(quoted, texts)
        logger.info(
            f"Sample {number} of {len(prompts)} after step {step}: {asked} | Answer {said}"
            f"{' (cut off)' * is_cut} | Reference {expected}"
        )
    seconds = time.perf_counter() - began
    logger.info(f"Samples took {seconds:.1f} s for {sum(map(len, answers))} tokens")


def _greedy(
    context: TrainContext, prompts: list[Prompt], ends: list[int], stop: StopRequest | None
) -> list[list[int]] | None:
    """Return the likeliest tokens behind each prompt, with the one that ends the answer, if any.

    Each further token is one forward over the whole texts. Return None on every rank if a rank has
    received a signal.
    """
    config, world = context.run.config, context.run.world
    most_tokens = config.data.max_length
    texts = [prompt.tokens[: most_tokens - 1] for prompt in prompts]
    begins = [len(text) for text in texts]
    unended = [*range(len(texts))]
    while unended:
        data_set = UnfinishedTexts(texts)
        rows = [
            in_rows(texts, unended[rank :: world.layout.data_ranks], most_tokens, context.is_flat)
            for rank in range(world.layout.data_ranks)
        ]
        # All ranks make the same number of forwards, with or without texts of their own.
        for row_of_each in zip_longest(*rows, fillvalue=list[int]()):
            own = row_of_each[world.data_rank]
            batch = build_batch(data_set, own, context.is_flat, world.share)
            chosen = context.stage.forward(batch.to(world.device), _next_tokens)
            context.stage.finish()
            found = chosen.tolist() if chosen.dim() else []  # only the last stage has some
            for pairs, is_stopped in world.all_gather_json([found, bool(stop and stop.received)]):
                if is_stopped:
                    return None
                for number, token in pairs:
                    texts[number].append(token)
        unended = [
            n
            for n in unended
            if texts[n][-1] not in ends
            and len(texts[n]) < min(begins[n] + config.eval.sample_tokens, most_tokens - 1)
        ]
    return [text[begin:] for text, begin in zip(texts, begins, strict=True)]


def _next_tokens(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return for each text of the batch its number and its next token: int64 [texts, 2]."""
    return torch.stack([batch.targets, predicted_logits(model, batch).argmax(-1)], -1)


def find_pending_evaluation(run: Run, data: PreparedData, schedule: Schedule) -> int | None:
    """Return the step whose evaluation must come before the first step, or None.

    It is step 0 for the baseline, or the checkpoint's step if a signal cut its evaluation short.
    """
    # Then the evaluation is due, and metrics.jsonl has the step and no evaluation.
    config, resumed = run.config.eval, run.resumed
    if not data.eval:
        return None
    if resumed is None:
        return 0 if config.baseline else None
    is_leader = run.directory.is_leader(run.world)
    entries = read_entries(run.metrics_file, resumed.step) if is_leader else ()
    here = [entry["kind"] for entry, _ in entries if entry["step"] == resumed.step]
    kinds = set(chain(*run.world.all_gather_json(here)))  # another disk may have been node 0's
    is_missing = "step" in kinds and "eval" not in kinds
    return (
        resumed.step if is_missing and schedule.is_due(resumed.step, config.every_steps) else None
    )
