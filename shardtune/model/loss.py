"""The loss: a sum over trained tokens, divided once by their number in the whole global batch.

Only the positions that predict a trained token reach the head of the model. Projection and cross-entropy go through
them in chunks, and the gradients are made with the loss, so that no tensor of tokens x vocabulary exists (the idea of
arXiv 2410.10989 and 2411.09009). A model that changes its logits after the head has to have those of the trained
positions at once, and one whose head is not a plain one has those of all.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from shardtune.data.batch import Batch
from shardtune.model.attention import documents
from shardtune.model.build import forward_only

_CHUNK_BYTES = 1 << 28  # of logits, in the dtype of the matrix product
_SOFTMAX_BYTES = 1 << 26  # of those in float32
_BLOCK_ROWS = 1 << 13  # of the head's weight


def summed_loss(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """The sum of the negative log-likelihoods (nats, float32, a scalar) of the batch's trained tokens.

    A sum, because a mean over a micro-batch or a rank weights tokens by where they happen to lie, and is NaN where
    nothing is trained. Here such a batch gives zero, with a graph, so that its backward joins the collectives.
    """
    head = model.get_output_embeddings()
    documents.set(batch.lengths, batch.boundaries)
    if isinstance(head, LossHead):
        head.batch = batch
    try:
        output = model(**batch.inputs()).logits
    finally:
        if isinstance(head, LossHead):
            head.batch = None
    if not isinstance(head, LossHead):
        output = output.flatten(0, 1).index_select(0, batch.predicting)
    elif not head.is_last:
        output = output.squeeze(0)
    else:
        return cast(torch.Tensor, output)
    return F.cross_entropy(output.float(), batch.targets, reduction="sum")


class LossHead(nn.Linear):
    """A model's head while a batch is asked for: it projects what predicts trained tokens, and nothing else.

    Where nothing follows the head in the model (`is_last`) it gives the summed loss itself, else (1, n, vocabulary)
    logits, which the model goes on to scale or cap.
    """

    batch: Batch | None
    is_last: bool

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.batch is None:
            return super().forward(hidden)
        predicting = hidden.flatten(0, -2).index_select(0, self.batch.predicting)
        if not self.is_last:
            return super().forward(predicting).unsqueeze(0)
        arguments = (
            predicting,
            self.weight,
            self.bias,
            self.batch.targets,
            torch.is_grad_enabled(),
        )
        return cast(torch.Tensor, _SummedCrossEntropy.apply(*arguments))


class _SummedCrossEntropy(torch.autograd.Function):
    """sum_i logsumexp(W h_i + b) - (W h_i + b)[target_i], and its gradients, chunk by chunk.

    Matrix products are in the dtype of their operands, as in the plain head; softmax, loss and the sums over chunks
    in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # (n, width)
        weight: torch.Tensor,  # (vocabulary, width)
        bias: torch.Tensor | None,  # (vocabulary,)
        targets: torch.Tensor,  # (n,)
        wants_gradients: bool,
    ) -> torch.Tensor:
        vocabulary = weight.shape[0]
        rows = max(1, min(len(hidden), _CHUNK_BYTES // (hidden.itemsize * vocabulary)))
        logits_of_chunk = hidden.new_empty(rows, vocabulary)
        # In float32 the logits turn into their softmax in place, else a few rows of them at a time.
        at_once = (
            rows
            if hidden.dtype == torch.float32
            else max(1, min(rows, _SOFTMAX_BYTES // (4 * vocabulary)))
        )
        converted = (
            None if hidden.dtype == torch.float32 else hidden.new_empty(at_once, vocabulary).float()
        )
        loss = hidden.new_zeros((), dtype=torch.float32)
        gradients = (
            _Gradients(hidden, weight, bias, is_one_chunk=rows == len(hidden))
            if wants_gradients
            else None
        )
        for start in range(0, len(hidden), rows):
            chunk, targets_of_chunk = (
                hidden[start : start + rows],
                targets[start : start + rows, None],
            )
            logits_now = logits_of_chunk[: len(chunk)]
            if bias is None:
                torch.mm(chunk, weight.t(), out=logits_now)
            else:
                torch.addmm(bias, chunk, weight.t(), out=logits_now)
            for logits, wanted in zip(
                logits_now.split(at_once), targets_of_chunk.split(at_once), strict=True
            ):
                softmax = logits if converted is None else converted[: len(logits)].copy_(logits)
                target_logits, largest = softmax.gather(1, wanted), softmax.amax(1, keepdim=True)
                torch.softmax(softmax, 1, out=softmax)
                # log sum exp is what lies between the largest logit and its log-probability.
                loss += (largest - softmax.amax(1, keepdim=True).log() - target_logits).sum()
                if gradients:
                    softmax.scatter_add_(1, wanted, softmax.new_full(wanted.shape, -1.0))
                    logits.copy_(softmax)
            if gradients:
                gradients.add(start, chunk, logits_now)
        ctx.gradients = gradients and (gradients.of_hidden, gradients.of_weight, gradients.of_bias)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_loss: torch.Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place, so good for one backward
        return (
            *(None if gradient is None else gradient.mul_(of_loss) for gradient in gradients),
            None,
            None,
        )


class _Gradients:
    """Those of hidden states, weight and bias, filled chunk by chunk."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        is_one_chunk: bool,
    ) -> None:
        self._weight = weight
        dtype = weight.dtype if is_one_chunk else torch.float32
        self.of_hidden = torch.empty_like(hidden)
        self.of_weight = torch.zeros_like(weight, dtype=dtype) if weight.requires_grad else None
        self.of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)

    def add(self, start: int, chunk: torch.Tensor, of_logits: torch.Tensor) -> None:
        torch.mm(of_logits, self._weight, out=self.of_hidden[start : start + len(chunk)])
        if self.of_weight is not None and self.of_weight.dtype == chunk.dtype:
            self.of_weight.addmm_(of_logits.t(), chunk)
        elif self.of_weight is not None:
            # By blocks of the vocabulary: their product is in the dtype of the operands before it is added.
            of_blocks = of_logits.t().split(_BLOCK_ROWS)
            for block, of_block in zip(self.of_weight.split(_BLOCK_ROWS), of_blocks, strict=True):
                block += of_block @ chunk
        if self.of_bias is not None:
            self.of_bias += of_logits.sum(0, dtype=torch.float32)


def use_loss_head(model: PreTrainedModel, device: torch.device) -> str | None:
    """Let the head give the loss, if the model's own forward shows that it may.

    Which logits there are at once, if not those of a chunk, and why: words to follow "logits are made". A stand-in
    for the logits must come out of the model as it came out of the head.
    """
    head: Any = model.get_output_embeddings()
    kind: Any = type(head)
    if kind is not nn.Linear:
        return f"for every position, since its head is {kind.__name__}"
    ids = torch.arange(8, device=device).view(1, -1) % model.config.get_text_config().vocab_size
    documents.set([8], torch.tensor([0, 8], dtype=torch.int32, device=device))
    seen: list[torch.Size] = []
    marker = torch.zeros(1, 8, head.weight.shape[0], device=device)

    def stand_in(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape)
        return marker

    head.forward = stand_in
    try:
        with forward_only(model):
            logits = model(input_ids=ids).logits
    finally:
        del head.forward
    if len(seen) != 1 or seen[0][:-1].numel() != ids.numel():
        return f"for every position, since its forward calls the head {len(seen)} times, or not for every token"
    head.__class__ = LossHead
    head.batch, head.is_last = None, logits is marker
    if not head.is_last:
        return f"for all trained positions at once, since {model.config.model_type} changes them after its head"
    return None
