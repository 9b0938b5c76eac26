"""The loss head equals plain PyTorch in loss and gradients."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code
from transformers import LlamaConfig, LlamaForCausalLM

from shardtune.data.batch import Batch
from shardtune.model import loss as loss_module
from shardtune.model.loss import LossHead, use_loss_head
from shardtune.planner.arithmetic.machine import launched
from shardtune.planner.simulation.tracker import Tracker


def a_head(
    width: int, vocabulary: int, has_bias: bool, dtype: torch.dtype, predicting: torch.Tensor
) -> tuple[LossHead, torch.Tensor]:
    """A head that is asked for targets at these positions, and the targets."""
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=has_bias).to(dtype)
    targets = torch.randint(0, vocabulary, predicting.shape)
    empty = torch.empty(0)
    head.__class__ = LossHead
    assert isinstance(head, LossHead)
    head.batch = Batch(empty, None, None, predicting, targets, [], empty)
    head.is_last = True
    return head, targets


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_model_may_change_its_logits_in_place(has_bias):
    """FSDP2 warns of a view: its hooks are lost where that is changed."""
    head, _ = a_head(16, 331, has_bias, torch.float32, torch.arange(5))
    head.makes_logits = True
    assert not head(torch.randn(1, 9, 16, requires_grad=True))._is_view()


class CapsInPlace(LlamaForCausalLM):
    def forward(self, *given: Any, **options: Any) -> Any:
        output = super().forward(*given, **options)
        output.logits.clamp_(-1, 1)
        return output


@pytest.mark.parametrize("kind", [LlamaForCausalLM, CapsInPlace])
def test_a_head_returns_the_loss_only_where_nothing_changes_its_logits(kind):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = kind(LlamaConfig(vocab_size=97, num_hidden_layers=1, **sizes))
    said = use_loss_head(model, torch.device("cpu"))
    assert (said is None) == model.get_output_embeddings().is_last == (kind is LlamaForCausalLM)


def gradients_of(loss: torch.Tensor, *tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return list(torch.autograd.grad(3 * loss, [tensor for tensor in tensors if tensor is not None]))


@pytest.mark.parametrize("chunk_rows", [1, 7, 100])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradients_equal_plain_pytorch_in_float64(
    chunk_rows, has_bias, scale, weighted, monkeypatch
):
    """Also where a softmax is so sharp that most probabilities are zero."""
    monkeypatch.setitem(loss_module._CHUNK_BYTES, "cpu", chunk_rows * 4 * 331)
    predicting = torch.arange(0, 60, 3)
    head, targets = a_head(16, 331, has_bias, torch.float32, predicting)
    weights = torch.rand(20) if weighted else torch.ones(20)
    assert head.batch
    head.batch = replace(head.batch, weights=weights if weighted else None)
    hidden = (scale * torch.randn(2, 30, 16)).requires_grad_()
    got = head(hidden)
    found = gradients_of(got, hidden, head.weight, head.bias)
    exact = [
        x.detach().double().requires_grad_()
        for x in (hidden, head.weight, *([head.bias] if has_bias else []))
    ]
    logits = F.linear(exact[0].flatten(0, 1)[predicting], *exact[1:])
    expected = F.cross_entropy(logits, targets, reduction="none") @ weights.double()
    assert got.item() == pytest.approx(expected.item(), rel=1e-6)
    for mine, theirs in zip(found, gradients_of(expected, *exact), strict=True):
        torch.testing.assert_close(
            mine.double(), theirs, rtol=2e-5, atol=2e-5 * theirs.abs().max().item()
        )


@pytest.mark.parametrize("makes_logits", [False, True])
def test_rows_that_train_stand_for_those_of_a_frozen_head(makes_logits, monkeypatch):
    """In several chunks, and in logits that a model goes on to change."""
    monkeypatch.setitem(loss_module._CHUNK_BYTES, "cpu", 7 * 4 * 331)
    predicting, runs, ids = torch.arange(0, 60, 3), [slice(3, 4), slice(90, 93)], [3, 90, 91, 92]
    head, targets = a_head(16, 331, False, torch.float32, predicting)
    targets[:6] = torch.tensor([3, 91, 91, 92, 90, 3])
    head.weight.requires_grad_(False)
    head.token_rows, head.runs = nn.Parameter(torch.randn(4, 16)), runs
    head.makes_logits = makes_logits
    hidden = torch.randn(1, 60, 16, requires_grad=True)
    weight = head.weight.index_copy(0, torch.tensor(ids), head.token_rows)
    logits = F.linear(hidden[0, predicting], weight)
    expected = F.cross_entropy(logits, targets, reduction="sum")
    got = head(hidden)
    if makes_logits:
        torch.testing.assert_close(got[0], logits)
        got = F.cross_entropy(got[0], targets, reduction="sum")
    torch.testing.assert_close(got, expected)
    trained = hidden, head.token_rows
    for found, wanted in zip(
        gradients_of(got, *trained), gradients_of(expected, *trained), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_loss_in_bfloat16_is_as_near_to_the_truth_as_the_plain_head(monkeypatch):
    predicting = torch.arange(200)
    head, targets = a_head(64, 500, True, torch.bfloat16, predicting)
    hidden = torch.randn(200, 64, dtype=torch.bfloat16, requires_grad=True)
    tensors = (hidden, head.weight, head.bias)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]

    def errors(loss: torch.Tensor) -> list[float]:
        true_loss = F.cross_entropy(F.linear(*exact), targets, reduction="sum")
        pairs = zip(gradients_of(loss, *tensors), gradients_of(true_loss, *exact), strict=True)
        relative = [
            ((mine.double() - theirs).norm() / theirs.norm()).item() for mine, theirs in pairs
        ]
        return [abs(loss.item() / true_loss.item() - 1), *relative]

    plain = errors(F.cross_entropy(F.linear(*tensors).float(), targets, reduction="sum"))
    for chunk_rows in (200, 16):
        monkeypatch.setitem(loss_module._CHUNK_BYTES, "cpu", chunk_rows * 4 * 500)
        for mine, theirs in zip(errors(head(hidden)), plain, strict=True):
            assert mine <= 1.25 * theirs + 2e-5


def test_a_batch_without_a_trained_token_has_a_zero_loss_with_gradients():
    head, _ = a_head(16, 331, True, torch.float32, torch.arange(0))
    hidden = torch.randn(1, 9, 16, requires_grad=True)
    loss = head(hidden)
    assert loss.item() == 0
    assert all(
        not gradient.any() for gradient in gradients_of(loss, hidden, head.weight, head.bias)
    )


def test_the_loss_makes_gradients_only_where_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(loss_module, "_Gradients", None)
    head, _ = a_head(16, 331, False, torch.float32, torch.arange(5))
    with torch.no_grad():
        assert head(torch.randn(1, 9, 16)).item() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_compiled_loss_is_the_eager_one_without_a_matrix_of_float32(dtype):
    """As a GPU runs it, compiled for this CPU: one function, with a number a row in between."""
    torch.manual_seed(0)
    rows, vocabulary = 64, 1000
    logits = (3 * torch.randn(rows, vocabulary)).to(dtype)
    logits[0] += 200  # more than exp of a float32 can hold
    targets = torch.randint(0, vocabulary, (rows, 1))
    converted = torch.empty(0 if dtype == torch.float32 else 7, vocabulary)
    compiled = torch.compile(loss_module._add_loss_at_once, dynamic=True, fullgraph=True)

    def run(add_loss: Any, n: int, wants_gradients: bool) -> list[torch.Tensor]:
        loss, left = torch.zeros(()), logits[:n].clone()
        older = [left.gather(1, targets[:n])] if torch.__version__ < "2.13" else []
        add_loss(loss, left, targets[:n], wants_gradients, converted, weights, *older)
        return [loss, left if weights is None else left.float()]

    weights: torch.Tensor | None = None
    found, (code, *others) = run_and_get_code(run, compiled, rows, True)
    assert not others and len(re.findall(r"^ +cpp_fused\w+\(", code, re.MULTILINE)) == 1
    sizes = re.findall(r"= empty_strided_cpu\(\((.*?)\), ", code)
    assert sizes and all("1" in size.split(", ") for size in sizes if size), sizes
    spacing = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    for n in (rows, 3):
        for mine, expected in zip(
            found if n == rows else run(compiled, n, True),
            run(loss_module._add_loss, n, True),
            strict=True,
        ):
            torch.testing.assert_close(mine, expected, rtol=spacing, atol=1e-6)
    weights = torch.rand(rows, 1)
    for mine, expected in zip(
        run(compiled, rows, True), run(loss_module._add_loss, rows, True), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=spacing, atol=1e-6)
    weights = None
    loss, left = run(compiled, rows, False)
    assert torch.equal(left, logits) and torch.equal(loss, found[0])


@pytest.mark.parametrize(("wants_gradients", "kernels", "passes"), [(True, 3, 4), (False, 2, 2)])
def test_a_plans_loss_moves_the_logits_as_often_as_the_compiled_one(
    wants_gradients, kernels, passes
):
    """A GPU's two sums read them each, and gradients take their place."""
    tracker, logits = Tracker(), torch.zeros(64, 5000, dtype=torch.bfloat16)
    with tracker.following():
        loss_module._planned_add_loss(None, logits, None, wants_gradients, None)
    moved = sum(n * kernel.n_bytes for kernel, n in tracker.kernels.items())
    assert launched(tracker.kernels) == kernels
    assert moved == pytest.approx(passes * logits.nbytes, rel=0.01)
