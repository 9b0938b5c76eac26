"""The loss: a sum over trained tokens, divided once by their number in the whole global batch, or
both by their weights.

Only the positions that predict a trained token reach the model's head. Projection and cross-entropy
process them in chunks, and gradients are computed with the loss, so that no tensor of tokens x
vocabulary exists (as in arXiv 2410.10989 and 2411.09009). On a GPU softmax, loss and gradient of a
chunk are one compiled function, which reads the logits and leaves their gradient in place. A model
that changes its logits after the head needs the logits of all trained positions at once. A model
whose head is not a plain linear layer makes the logits of all positions.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from shardtune.data.batch import Batch
from shardtune.distributed.compiling import compiled_or_eager
from shardtune.model import documents
from shardtune.model.fsdp_groups import forward_only

# Logits of a chunk, in the dtype of the matrix product. Each further chunk reads and writes the
# float32 gradient of the head's weight once more, so a GPU takes 4096 tokens at once with a
# vocabulary of 152,000.
_CHUNK_BYTES = {"cpu": 1 << 28, "cuda": 5 << 28}
_SOFTMAX_BYTES = 1 << 26  # the logits of a chunk in float32
_BLOCK_ROWS = 1 << 13  # rows of the head's weight per block
HEAD_TRIAL_TOKENS = 8
# What the last stage makes of a batch, such as a sum over its trained tokens.
Measure = Callable[[PreTrainedModel, Batch], torch.Tensor]
_TRIED_ROWS = 512  # with fewer rows the compiler splits each row's sum over more kernels


def summed_loss(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the summed negative log-likelihood of the trained tokens: nats, a float32 scalar.

    Each counts by its weight, if the batch has weights.
    """
    # A mean over a micro-batch or a rank would weight tokens by where they happen to lie, and be
    # NaN where nothing is trained. A sum is zero there, with a graph: the backward of that batch
    # must join the collectives for which other ranks wait.
    head = model.get_output_embeddings()
    if not (isinstance(head, LossHead) and head.is_last):
        logits = predicted_logits(model, batch).float()
        if batch.weights is None:
            return F.cross_entropy(logits, batch.targets, reduction="sum")
        return F.cross_entropy(logits, batch.targets, reduction="none") @ batch.weights
    head.batch = batch
    try:
        return cast(torch.Tensor, model(**batch.inputs()).logits)
    finally:
        head.batch = None


def predicted_logits(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Return the logits of the positions that predict trained tokens: [n, vocabulary]."""
    head = model.get_output_embeddings()
    if not isinstance(head, LossHead):
        return model(**batch.inputs()).logits.flatten(0, 1).index_select(0, batch.predicting)
    head.batch, head.makes_logits = batch, True
    try:
        return model(**batch.inputs()).logits.squeeze(0)
    finally:
        head.batch, head.makes_logits = None, False


class HeadWithRows(nn.Linear):
    """A head without bias, whose weight is frozen; `token_rows` train in place of its `runs`."""

    token_rows: nn.Parameter  # (rows of all runs, width)
    runs: Sequence[slice] = ()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().forward(hidden)
        for run, rows in _by_run(self.runs, self.token_rows) if self.runs else ():
            logits = logits.slice_scatter(F.linear(hidden, rows), -1, run.start, run.stop)
        return logits


def _by_run(runs: Sequence[slice], rows: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
    return [*zip(runs, rows.split([run.stop - run.start for run in runs]), strict=True)]


class LossHead(HeadWithRows):
    """A model's head that projects only the positions that predict trained tokens of `batch`.

    Where nothing follows the head in the model (`is_last`) it returns the summed loss itself, else
    or with `makes_logits` logits (1, n, vocabulary), which the model goes on to scale or cap.
    """

    batch: Batch | None
    is_last: bool
    makes_logits = False
    device_type = "cpu"  # the run's device: a plan simulates a GPU's run on a CPU

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.batch is None:
            return super().forward(hidden)
        predicting = hidden.flatten(0, -2).index_select(0, self.batch.predicting)
        if self.makes_logits or not self.is_last:
            logits = super().forward(predicting.unsqueeze(0))
            # No view, which it is with a bias: FSDP2 loses its hooks where one is changed in place.
            return logits if self.bias is None else logits.clone()
        options = torch.is_grad_enabled(), self.device_type, self.batch.weights
        rows = (self.token_rows, self.runs) if self.runs else ()
        arguments = (predicting, self.weight, self.bias, self.batch.targets, *options, *rows)
        return cast(torch.Tensor, _SummedCrossEntropy.apply(*arguments))


class _SummedCrossEntropy(torch.autograd.Function):
    """sum_i w_i (logsumexp(W h_i + b) - (W h_i + b)[target_i]), its gradients, chunk by chunk.

    Matrix products are in the dtype of their operands, as in the plain head; softmax, loss and the
    sums over chunks in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # (n, width)
        weight: torch.Tensor,  # (vocabulary, width)
        bias: torch.Tensor | None,  # (vocabulary,)
        targets: torch.Tensor,  # (n,)
        wants_gradients: bool,
        device_type: str,
        weights: torch.Tensor | None = None,  # float32 (n,); None: all are 1
        token_rows: torch.Tensor | None = None,  # (rows of all runs, width), as in HeadWithRows
        runs: Sequence[slice] = (),
    ) -> torch.Tensor:
        vocabulary, is_float32 = weight.shape[0], hidden.dtype == torch.float32
        chunk_bytes = _CHUNK_BYTES[device_type]
        rows = max(1, min(len(hidden), chunk_bytes // (hidden.itemsize * vocabulary)))
        chunk_buffer = hidden.new_empty(rows, vocabulary)
        # In float32 the softmax replaces the logits in place, else a few rows are converted at a
        # time.
        at_once = rows if is_float32 else max(1, min(rows, _SOFTMAX_BYTES // (4 * vocabulary)))
        converted = hidden.new_empty(0 if is_float32 else at_once, vocabulary).float()
        loss = hidden.new_zeros((), dtype=torch.float32)
        by_run = [] if token_rows is None else _by_run(runs, token_rows)
        gradients = _Gradients(hidden, weight, bias, rows, by_run) if wants_gradients else None
        add_loss: Callable[..., None] = _add_loss
        if device_type == "cuda":
            # A plan has tensors without contents, and counts the kernels of the compiled function.
            add_loss = _compiled_add_loss(hidden.device) if hidden.is_cuda else _planned_add_loss
        for start in range(0, len(hidden), rows):
            chunk = hidden[start : start + rows]
            chunk_targets = targets[start : start + rows, None]
            chunk_logits = chunk_buffer[: len(chunk)]
            if bias is None:
                torch.mm(chunk, weight.t(), out=chunk_logits)
            else:
                torch.addmm(bias, chunk, weight.t(), out=chunk_logits)
            for run, own in by_run:
                chunk_logits[:, run] = F.linear(chunk, own)
            # `.data` hides the base of a view: for another base torch.compile would compile again.
            chunk_weights = None if weights is None else weights[start : start + rows, None].data
            given = (chunk_logits.data, chunk_targets.data, wants_gradients, converted)
            add_loss(loss, *given, chunk_weights)
            if gradients:
                gradients.add(start, chunk, chunk_logits)
        ctx.gradients = gradients and gradients.of_inputs()
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: torch.Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place: one backward uses them up
        scaled = [None if each is None else each.mul_(loss_gradient) for each in gradients]
        return (*scaled[:3], None, None, None, None, scaled[3], None)


def _add_loss(
    loss: torch.Tensor,  # float32, scalar
    chunk_logits: torch.Tensor,  # [n, vocabulary]
    chunk_targets: torch.Tensor,  # [n, 1]
    wants_gradients: bool,
    converted: torch.Tensor,  # float32 [rows at a time, vocabulary]; empty for float32 logits
    chunk_weights: torch.Tensor | None = None,  # float32 [n, 1]
    _: Any = None,
) -> None:
    """Add a chunk's loss to `loss`. If gradients are wanted, overwrite the logits with theirs."""
    rows_at_once = len(converted) or len(chunk_logits)
    for begin in range(0, len(chunk_logits), rows_at_once):
        rows = slice(begin, begin + rows_at_once)
        logits, wanted = chunk_logits[rows], chunk_targets[rows]
        weights = None if chunk_weights is None else chunk_weights[rows]
        softmax = converted[: len(logits)].copy_(logits) if len(converted) else logits
        target_logits, largest = softmax.gather(1, wanted), softmax.amax(1, keepdim=True)
        torch.softmax(softmax, 1, out=softmax)
        # log sum exp = the largest logit - its log-probability.
        losses = largest - softmax.amax(1, keepdim=True).log() - target_logits
        loss += (losses if weights is None else losses * weights).sum()
        if wants_gradients:
            softmax.scatter_add_(1, wanted, softmax.new_full(wanted.shape, -1.0))
            if weights is not None:
                softmax.mul_(weights)
            logits.copy_(softmax)


@functools.cache
def _compiled_add_loss(device: torch.device) -> Callable[..., None]:
    add_loss = compiled_or_eager(_add_loss_at_once, "the loss", device, eager=_add_loss)
    if torch.__version__ >= "2.13":
        return add_loss
    # Before 2.13 the compiler may read the targets' logits after gradients have overwritten them.
    return lambda *given: add_loss(*given, given[1].gather(1, given[2]))


def compile_loss(
    model: PreTrainedModel, dtype: torch.dtype, device: torch.device, evaluates: bool
) -> None:
    """Let a GPU compile the loss, and time its kernels, before a step needs the memory."""
    # Few rows: PyTorch copies the logits for each kernel that it times. And the graphs, which serve
    # any number of rows, do not depend on the first batch.
    head = model.get_output_embeddings()
    if device.type != "cuda" or not (isinstance(head, LossHead) and head.is_last):
        return
    logits = torch.zeros(_TRIED_ROWS, head.weight.shape[0], dtype=dtype, device=device)
    targets = torch.zeros(_TRIED_ROWS, 1, dtype=torch.int64, device=device)
    add_loss = _compiled_add_loss(device)
    with torch.no_grad():
        for wants_gradients in (True, False) if evaluates else (True,):
            loss = torch.zeros((), device=device)
            add_loss(loss, logits, targets, wants_gradients, logits[:0].float(), None)


def _planned_add_loss(
    _: Any, chunk_logits: torch.Tensor, __: Any, wants_gradients: bool, *___: Any
) -> None:
    """Stand for the compiled `_add_loss_at_once` in a plan, with the same kernels and bytes."""
    chunk_logits.amax(1)
    chunk_logits.sum(1)  # the sums of exponentials
    if wants_gradients:
        chunk_logits.exp_()


def _add_loss_at_once(
    loss: torch.Tensor,
    chunk_logits: torch.Tensor,
    chunk_targets: torch.Tensor,
    wants_gradients: bool,
    _: torch.Tensor,
    chunk_weights: torch.Tensor | None = None,
    target_logits: torch.Tensor | None = None,
) -> None:
    """Do as `_add_loss`, in a form that compiles into few kernels with no float32 in memory."""
    logits = chunk_logits.float()
    if target_logits is None:
        target_logits = logits.gather(1, chunk_targets)
    largest = logits.amax(1, keepdim=True)
    log_total = (logits - largest).exp().sum(1, keepdim=True).log()
    weights = 1.0 if chunk_weights is None else chunk_weights
    loss += ((largest + log_total - target_logits) * weights).sum()
    if wants_gradients:
        words = torch.arange(logits.shape[1], device=logits.device)
        # Computed again: the compiler may keep the exponentials in memory if two sums read them.
        probabilities = (logits - largest - log_total).exp()
        chunk_logits.copy_((probabilities - (words == chunk_targets).float()) * weights)


class _Gradients:
    """Holds the gradients of hidden states, weight, bias and token rows, which chunks fill."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: int,
        by_run: list[tuple[slice, torch.Tensor]],
    ) -> None:
        self._head_weight, self._by_run = weight, by_run
        self._of_runs = [torch.zeros_like(own, dtype=torch.float32) for _, own in by_run]
        # One chunk is one product, in the weight's dtype. Several chunks are added up in float32.
        dtype = weight.dtype if rows == len(hidden) else torch.float32
        self.hidden = torch.empty_like(hidden)
        self.weight = torch.zeros_like(weight, dtype=dtype) if weight.requires_grad else None
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)

    def of_inputs(self) -> tuple[torch.Tensor | None, ...]:
        of_runs = torch.cat(self._of_runs) if self._of_runs else None
        return self.hidden, self.weight, self.bias, of_runs

    def add(self, start: int, chunk: torch.Tensor, logits_gradient: torch.Tensor) -> None:
        hidden = self.hidden[start : start + len(chunk)]
        of_logits = [logits_gradient[:, run].clone() for run, _ in self._by_run]
        for run, _ in self._by_run:  # their logits are not of the weight
            logits_gradient[:, run] = 0
        torch.mm(logits_gradient, self._head_weight, out=hidden)
        for (_, own), of_run, of_own in zip(self._by_run, of_logits, self._of_runs, strict=True):
            hidden.addmm_(of_run, own)
            of_own += of_run.t() @ chunk
        if self.weight is not None and self.weight.dtype == chunk.dtype:
            self.weight.addmm_(logits_gradient.t(), chunk)
        elif self.weight is not None:
            # By blocks of the vocabulary, since each product has the dtype of its operands.
            logits_blocks = logits_gradient.t().split(_BLOCK_ROWS)
            weight_blocks = self.weight.split(_BLOCK_ROWS)
            for block, logits_block in zip(weight_blocks, logits_blocks, strict=True):
                block += logits_block @ chunk
        if self.bias is not None:
            self.bias += logits_gradient.sum(0, dtype=torch.float32)


def use_loss_head(
    model: PreTrainedModel, device: torch.device, device_type: str = ""
) -> str | None:
    """Let the head return the loss, if the model's own forward allows it.

    Returns None, or the words behind "logits are made": which logits exist at once, and why.
    `device_type`: that of the run, if `device` has another one.
    """
    # A marker takes the place of the logits. Unless the model returns that very tensor unchanged,
    # it does something with its logits, and the head may not return a loss.
    head: Any = model.get_output_embeddings()
    kind: Any = type(head)
    if kind not in (nn.Linear, HeadWithRows):
        return f"for every position, since its head is {kind.__name__}"
    tokens = HEAD_TRIAL_TOKENS
    ids = torch.arange(tokens, device=device).view(1, -1)
    ids %= model.config.get_text_config().vocab_size
    seen: list[int] = []  # positions in each call of the head
    marker = torch.zeros(1, tokens, head.weight.shape[0], device=device)

    def stand_in(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape[:-1].numel())
        return marker

    head.forward = stand_in
    try:
        with documents.of(documents.row_of([tokens], device)), forward_only(model):
            logits = model(input_ids=ids).logits
    finally:
        del head.forward
    if seen != [tokens]:
        return "for every position, since its forward does not call the head once for all tokens"
    head.__class__ = LossHead
    head.batch, head.is_last = None, logits is marker and not marker._version
    head.device_type = device_type or device.type
    after = f"since {model.config.model_type} changes them after its head"
    return None if head.is_last else f"for all trained positions at once, {after}"
