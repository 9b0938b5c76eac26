"""The forwards and backwards of this rank's layers, and the tensors that travel between stages.

Stages work on different micro-batches at the same time, one forward and one backward each in turn
(1F1B, arXiv 2006.09503). A stage is as many forwards ahead as there are stages behind it. Hidden
states travel to the next stage, and their gradients back. A run without stages is one stage.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from shardtune.data.batch import Batch
from shardtune.distributed.exchange import heads_between
from shardtune.distributed.meshes import Link
from shardtune.distributed.tensors import DTYPES, to_local
from shardtune.distributed.world import World
from shardtune.model import documents
from shardtune.model.loss import Measure, summed_loss
from shardtune.training.states.replica_shards import OwnedParameters

_MOST_SENT = 2  # hidden states of an evaluation that have not arrived


class Stage:
    """This rank's layers, and the ranks that it receives from and sends to."""

    def __init__(self, model: PreTrainedModel, owned: OwnedParameters, world: World) -> None:
        self._model, self._owned, self._world = model, owned, world
        # Hidden states travel between stages in this dtype.
        self._dtype = DTYPES[world.layout.compute_dtype]
        self._heads = heads_between(world)
        self._before, self._behind = world.meshes.before, world.meshes.behind
        # Received hidden states and output of each micro-batch whose backward has not come yet.
        self._in_flight: deque[tuple[torch.Tensor | None, torch.Tensor]] = deque()
        self._to_come = deque[tuple[Batch, bool]]()  # a pass: its batch, whether it is a forward
        self._arriving: deque[tuple[Any, torch.Tensor]] = deque()
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._shared_weight, self._other_owner = owned.shared, 0
        if self._shared_weight is not None:
            last_stage_begins = world.size - world.layout.stage_ranks
            self._other_owner = world.stage_rank + (0 if self._before else last_stage_begins)

    def passes(self, micro_batches: Sequence[Batch]) -> Iterable[tuple[Batch, range]]:
        """Return each micro-batch, for its forward, with the numbers of the backwards behind it."""
        # Without stages a forward is followed by its own backward. A stage is ahead of the stages
        # behind it: no backward follows its first forwards, and several follow its last one.
        ahead, last = self._world.layout.stages - 1 - self._world.stage, len(micro_batches) - 1
        # Backward n - ahead follows forward n; all that are left then follow the last forward.
        due = [range(max(0, n - ahead), n + 1 - (n < last) * ahead) for n in range(last + 1)]
        for batch, numbers in zip(micro_batches, due, strict=True):
            self._to_come.append((batch, True))
            self._to_come += [(micro_batches[number], False) for number in numbers]
        self._expect_next()
        return zip(micro_batches, due, strict=True)

    def forward(self, batch: Batch, measure: Measure | None = None) -> torch.Tensor:
        """Return a micro-batch's summed negative log-likelihood: nats, 0 but in the last stage.

        With gradients enabled its `backward` must follow. `measure`: what the last stage makes of
        the batch instead, such as `predicted_logits`.
        """
        received = None
        if self._before and not self._arriving:  # an evaluation has no `passes`
            self._expect(batch, is_forward=True)
        # The tensor of the next pass travels while this pass computes. Receives must begin in the
        # order in which the neighbouring stage sends.
        self._expect_next()
        if self._before:
            received = self._receive()
            received.requires_grad_(torch.is_grad_enabled())
            # The module in the embedding's place returns these instead of looking tokens up.
            cast(Any, self._model.get_input_embeddings()).hidden = received
        with documents.of(batch, self._heads):
            if self._behind:
                self._model(**batch.inputs())
                output = cast(Any, self._model.get_output_embeddings()).take()
                self._send(output.detach(), self._behind, self._behind.forward)
            else:
                output = (measure or summed_loss)(self._model, batch)
        if torch.is_grad_enabled():
            self._in_flight.append((received, output))
        return output.new_zeros((), dtype=torch.float32) if self._behind else output.detach()

    def backward(self, batch: Batch, scale: float) -> None:
        """Add the gradients of the oldest micro-batch in flight, `batch`, times `scale`."""
        self._expect_next()
        received, output = self._in_flight.popleft()
        with documents.of(batch, self._heads):  # for layers that are computed again
            if self._behind:
                output.backward(self._receive())
            else:
                # Only the last stage scales: other stages receive scaled gradients.
                (output * scale).backward()
        if self._before:
            assert received is not None and received.grad is not None
            self._send(received.grad, self._before, self._before.backward)

    def finish(self) -> None:
        """Wait until all sent tensors have arrived, and sum the gradients of a tied weight."""
        with self._world.progress.waiting(), self._world.progress.message():
            while self._sent:
                self._sent.popleft()[0].wait()
        weight = self._shared_weight
        # Two stages hold a weight that embedding and head share: both update it by the same sum.
        # Send and receive are one batch: two stages that both send first would wait for ever.
        if weight is not None and weight.grad is not None:
            gradient = to_local(weight.grad)
            received = torch.empty_like(gradient)
            sides = [(dist.isend, gradient), (dist.irecv, received)]
            with self._world.progress.waiting(), self._world.progress.message():
                for work in dist.batch_isend_irecv(
                    [dist.P2POp(side, tensor, self._other_owner) for side, tensor in sides]
                ):
                    work.wait()
            gradient += received

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that this rank updates, each in one stage only."""
        for parameter in self._owned.by_name.values():
            if not self._before or parameter is not self._shared_weight:
                yield parameter

    def _expect_next(self) -> None:
        """Begin to receive the tensor of the next pass, which may arrive during this one."""
        if self._to_come:
            self._expect(*self._to_come.popleft())

    def _expect(self, batch: Batch, is_forward: bool) -> None:
        """Begin to receive the tensor that a pass needs, if another stage sends it."""
        link = self._before if is_forward else self._behind
        if link is None:
            return
        width = self._model.config.get_text_config().hidden_size
        shape = (*batch.input_ids.shape, width)
        received = torch.empty(shape, dtype=self._dtype, device=self._world.device)
        group = link.forward if is_forward else link.backward
        self._arriving.append((dist.irecv(received, link.rank, group), received))

    def _receive(self) -> torch.Tensor:
        work, received = self._arriving.popleft()
        with self._world.progress.waiting(), self._world.progress.message():
            work.wait()
        return received

    def _send(self, tensor: torch.Tensor, link: Link, group: dist.ProcessGroup) -> None:
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, link.rank, group), tensor))
        if torch.is_grad_enabled():
            while self._sent and self._sent[0][0].is_completed():
                self._sent.popleft()
        elif len(self._sent) > _MOST_SENT:
            # In an evaluation no gradient comes back for which a stage waits: without this wait it
            # would run ahead without a bound. All ranks of a stage wait equally often, so that the
            # count of waits shows a stuck rank.
            with self._world.progress.waiting(), self._world.progress.message():
                self._sent.popleft()[0].wait()
