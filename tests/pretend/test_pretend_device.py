"""The pretended GPU refuses what a GPU would, and tells waits and memory as one does."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pretend_gpu
import pytest
import torch
from helpers.pretended import needs_compiler, on_gpus
from pretend_gpu.waits import host_waits
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from distTest.gpu_check import exactness
from distTest.gpu_check.checks import Failed
from shardtune.distributed.gpus import use_gpu
from shardtune.distributed.host_memory import pinned_zeros, unpin
from shardtune.model.documents import attention
from shardtune.model.moe.grouped_experts import expert_outputs
from shardtune.optimizers.rules import AdamW, AdamW8bit
from shardtune.planner.simulation.tracker import varlen_workspace
from shardtune.training.states.sharded_optimizer import ShardedOptimizer

pytestmark = needs_compiler


def test_the_device_does_as_a_gpu(tmp_path):
    """In one process: each of the checks below, which names itself where it fails."""
    done = on_gpus(1, _check_all, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def _check_all() -> None:
    pretend_gpu.install(gpus=2, gb=0.1)
    for name, check in [*globals().items()]:
        if getattr(check, "__module__", "") == __name__ and not name.startswith(("_", "test_")):
            print(name, flush=True)
            check()


def _refused(work: Callable[[], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        work()


def tensors_of_two_devices_are_refused() -> None:
    x, other = torch.ones(4, 4, device="cuda"), torch.ones(4, 4, device="cuda:1")
    for mixed in (torch.ones(4, 4), other):
        _refused(lambda mixed=mixed: x + mixed, "Expected all tensors to be on the same device")
        _refused(lambda mixed=mixed: x @ mixed, "Expected all tensors to be on the same device")
        _refused(lambda mixed=mixed: torch.cat([x, mixed]), "to be on the same device")
    # Also where nothing is in it: a CPU's empty tensor, or a single number among others.
    _refused(lambda: torch.cat([x[0], torch.empty(0)]), "to be on the same device")
    _refused(lambda: torch.stack([x[0, 0], torch.tensor(1.0)]), "to be on the same device")
    state = [torch.zeros(())]  # of an optimizer, left on the host
    _refused(lambda: _adam(x, state), "to be on the same device")
    generator = torch.Generator()
    _refused(lambda: torch.rand(3, device="cuda", generator=generator), "generator")
    assert torch.equal(x + torch.tensor(1.0), x + 1), "numbers of the host are taken"
    _refused(lambda: torch.cuda.set_device(2), "invalid device ordinal")


def _adam(x: torch.Tensor, steps: list[torch.Tensor]) -> None:
    moments: list[list[torch.Tensor]] = [[x.clone()], [x.clone()], []]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    torch._fused_adamw_([x], [x.clone()], *moments, steps, amsgrad=False, maximize=False, **options)


def _qkv(tokens: int, heads: int, keys: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(tokens, n, width, dtype=dtype, device="cuda") for n in (heads, keys, keys)]


def _varlen(qkv: list[torch.Tensor], bounds: list[int], dtype: Any = torch.int32) -> torch.Tensor:
    ends = torch.tensor(bounds, dtype=dtype, device="cuda")
    longest = max(b - a for a, b in pairwise(bounds))
    options = {"window_size": (-1, 0), "enable_gqa": True}
    return varlen_attn(*qkv, ends, ends, longest, longest, **options)


def attention_refuses_what_its_kernel_does_not_take() -> None:
    bf16, bounds = torch.bfloat16, [0, 3, 8]
    _varlen(_qkv(8, 4, 2, 16, bf16), bounds)
    _refused(
        lambda: _varlen(_qkv(8, 4, 2, 16, torch.float32), bounds), "only support fp16 and bf16"
    )
    _refused(lambda: _varlen(_qkv(8, 4, 2, 12, bf16), bounds), "multiple of 8")
    _refused(lambda: _varlen(_qkv(8, 4, 2, 264, bf16), bounds), "at most 256")
    _refused(lambda: _varlen(_qkv(8, 4, 2, 16, bf16), bounds, torch.int64), "dtype int32")
    _refused(lambda: _varlen(_qkv(8, 4, 2, 16, bf16), [0, 3, 7]), "cu_seqlens")
    turned = [x.transpose(1, 2) for x in _qkv(8, 16, 16, 16, bf16)]
    _refused(lambda: _varlen(turned, bounds), "contiguous last dimension")


def attention_and_its_gradients_are_those_of_each_document_alone() -> None:
    """Against float64 on the CPU, by autograd: a sink is the score of a key without a value."""
    bounds = [0, 3, 4, 24]
    ends = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    for window, has_sink in ((0, False), (5, False), (0, True), (5, True), (1, True)):
        qkv = [x.requires_grad_() for x in _qkv(24, 4, 2, 16, torch.bfloat16)]
        sink = torch.linspace(-1, 2, 4).bfloat16().cuda().requires_grad_()
        given = [*qkv, *([sink] if has_sink else [])]
        exact = [x.detach().cpu().double().requires_grad_() for x in given]
        outputs = []
        for begin, end in pairwise(bounds):
            q, k, v = (x[begin:end].transpose(0, 1) for x in exact[:3])
            k, v = (x.repeat_interleave(2, 0) for x in (k, v))
            seen = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
            seen = seen.triu(1 - window) if window else seen
            scores = (q @ k.mT / 4).masked_fill(~seen, -torch.inf)
            if has_sink:
                column = exact[3].view(-1, 1, 1).expand(-1, end - begin, 1)
                scores = torch.cat([scores, column], -1)
            outputs.append((scores.softmax(-1)[..., : end - begin] @ v).transpose(0, 1))
        expected = torch.cat(outputs)
        found = attention._varlen(*qkv, ends, 20, None, window, sink if has_sink else None)
        torch.testing.assert_close(found.cpu().double(), expected, atol=0.02, rtol=0.01)
        weights = torch.randn_like(expected)
        (expected * weights).sum().backward()
        (found * weights.to("cuda", torch.bfloat16)).sum().backward()
        for tensor, of_exact in zip(given, exact, strict=True):
            found_gradient, gradient = tensor.grad.cpu().double(), of_exact.grad
            assert (found_gradient - gradient).norm() < 0.01 * gradient.norm(), (window, has_sink)


def a_deterministic_backward_of_attention_works_in_the_memory_of_a_plan() -> None:
    """Of 33 splits for 4 heads of one document, 17 for two."""
    for bounds in ([0, 64], [0, 60, 64]):
        qkv = [x.requires_grad_() for x in _qkv(64, 4, 2, 16, torch.bfloat16)]
        ends = torch.tensor(bounds, dtype=torch.int32)
        torch.cuda.reset_peak_memory_stats()
        output = attention._varlen(*qkv, ends.cuda(), 64, None)
        gradient, held = torch.ones_like(output), torch.cuda.memory_allocated()
        torch.autograd.grad(output, qkv, gradient)
        expected = varlen_workspace(qkv[0], qkv[1], ends)
        assert expected > 64 * 4 * 32 * 4 * (33 if len(bounds) == 2 else 17)
        found = torch.cuda.max_memory_allocated() - held
        assert found == pytest.approx(expected, rel=0.02), "copies of 16 kB beside it"


def memory_is_not_filled_while_attention_is_deterministic() -> None:
    """By the operator that fills what `torch.empty` makes."""

    def filled() -> bool:
        torch._C._set_deterministic_algorithms(True)
        try:
            with torch.profiler.profile() as profile:
                torch.empty(3)
        finally:
            torch._C._set_deterministic_algorithms(False)
        return "aten::fill_" in {event.key for event in profile.key_averages()}

    assert filled(), "PyTorch does so by default"
    use_gpu(0)
    assert not filled()


def an_eager_update_works_in_the_memory_of_a_plan() -> None:
    """Of whole blocks of 256, and with a rest that is padded to one."""
    for eight_bit, width in ((False, 256), (False, 1408), (True, 256), (True, 1408)):
        weight = nn.Parameter(torch.zeros(200, width, device="cuda", dtype=torch.bfloat16))
        weight.grad = torch.ones_like(weight)
        groups = [{"params": [("weight", weight)]}]
        more: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "seed": 1}
        adamw = ShardedOptimizer(groups, AdamW8bit if eight_bit else AdamW, lr=1e-3, **more)
        adamw.step()  # makes its states
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        adamw.step()
        worked_in = torch.cuda.max_memory_allocated() - before
        planned = adamw.eager_bytes(weight)
        assert worked_in == pytest.approx(planned, rel=0.02), (eight_bit, width)


def _groups(width: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    a = torch.randn(6, width, dtype=dtype, device="cuda")
    b = torch.randn(2, width, 8, dtype=dtype, device="cuda")
    return a, b, torch.tensor([2, 6], dtype=torch.int32, device="cuda")


def grouped_products_refuse_unaligned_matrices() -> None:
    a, b, ends = _groups(16)
    _refused(lambda: torch._grouped_mm(*_groups(12)), "multiple of 16 bytes")
    shifted = torch.randn(6 * 16 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(6, 16)
    _refused(lambda: torch._grouped_mm(shifted, b, ends), "aligned to 16 bytes")
    _refused(lambda: torch._grouped_mm(a, b, ends.long()), "int32")
    _refused(lambda: torch._grouped_mm(a, b.float(), ends), "Expected inputs of")
    _refused(lambda: torch._grouped_mm(a, b.cpu(), ends), "on one GPU|same device")
    _refused(lambda: torch._grouped_mm(a[:, ::2], b[:, ::2], ends), "Invalid strides/sizes")


def groups_of_any_size_follow_one_another_along_rows_alone() -> None:
    """Elsewhere each begins at 16 bytes, and none is empty where it is summed up."""

    def sum_of_groups(sizes: list[int], a_by_rows: bool, b_by_rows: bool) -> None:
        ends = torch.tensor(sizes, device="cuda").cumsum(0, dtype=torch.int32)
        a, b = (torch.randn(32, width).to("cuda", torch.bfloat16) for width in (16, 8))
        pairs = zip(a.double().split(sizes), b.double().split(sizes), strict=True)
        expected = torch.stack([x.t() @ y for x, y in pairs])
        a, b = (x if k else x.t().contiguous().t() for x, k in ((a, a_by_rows), (b, b_by_rows)))
        found = torch._grouped_mm(a.t(), b, ends)
        torch.testing.assert_close(found.double(), expected, atol=0.1, rtol=0.01)

    torch.manual_seed(0)
    odd, odd_and_empty = [1, 7, 13, 11], [1, 7, 0, 13, 11]
    sum_of_groups(odd_and_empty, True, True)
    for by_rows in ((False, True), (True, False)):
        sum_of_groups([8, 16, 8], *by_rows)
        _refused(partial(sum_of_groups, odd, *by_rows), "multiple of 16")
        _refused(partial(sum_of_groups, odd_and_empty, *by_rows), "greater than 0")
    rows = torch.randn(16, 8).to("cuda", torch.bfloat16).t()
    stacks = torch.randn(2, 16, 8).to("cuda", torch.bfloat16)
    ends = torch.tensor([3, 8], dtype=torch.int32, device="cuda")
    _refused(lambda: torch._grouped_mm(rows, stacks, ends), "multiple of 16")


def outputs_and_gradients_of_odd_groups_of_experts_are_exact() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPU_CHECK_TINY", "1")
        exactness.experts()  # raises what is wrong
        for factor, of_empty, problem in ((1.05, 0.0, "bfloat16: {"), (1.0, 0.1, "without rows")):

            def wrong(
                module: Any, *rest: Any, factor: float = factor, of_empty: float = of_empty
            ) -> Any:
                return factor * expert_outputs(module, *rest) + of_empty * module.down_proj[2, 0, 0]

            patch.setattr(exactness, "expert_outputs", wrong)
            with pytest.raises(Failed, match=problem):
                exactness.experts()


def waits_are_told_with_their_place() -> None:
    x = torch.arange(4, device="cuda")
    counts = torch.ones(4, dtype=torch.int64, device="cuda")
    pinned, pageable = torch.ones(3).pin_memory(), torch.ones(3)
    assert pinned.is_pinned() and not pageable.is_pinned()

    def waits(work: Callable[[], Any]) -> list[str]:
        with host_waits() as told:
            work()
        assert all("tests/pretend/test_pretend_device.py:" in wait.where for wait in told)
        return [wait.what for wait in told]

    assert waits(lambda: x + 1) == waits(lambda: x[counts]) == []
    assert waits(lambda: x.sum().item()) == ["a number that the host reads"]
    assert waits(lambda: x.tolist()) == ["a copy to the host"]
    assert waits(lambda: x.nonzero()) == ["aten::nonzero"]
    assert len(waits(lambda: x[x > 1])) >= 1, "the size of the result is the device's"
    assert waits(lambda: torch.tensor([1, 2], device="cuda")) == ["a copy from the host"]
    assert waits(lambda: pageable.to("cuda", non_blocking=True)) == ["a copy from the host"]
    assert waits(lambda: pinned.to("cuda", non_blocking=True)) == []
    assert waits(lambda: pinned.copy_(torch.ones(3, device="cuda"), non_blocking=True)) == []
    assert waits(lambda: x.repeat_interleave(counts)) == ["aten::repeat_interleave"]
    assert waits(lambda: x.repeat_interleave(counts, output_size=4)) == []
    assert waits(torch.cuda.synchronize) == ["synchronize the device"]
    y = torch.ones(3, device="cuda", requires_grad=True)
    y.register_hook(lambda gradient: gradient.sum().item() and None)
    assert len(waits(lambda: (y * 2).sum().backward())) == 1, "within a backward too"


def copies_land_for_the_host_when_it_waits() -> None:
    x, host = torch.ones(3, device="cuda"), torch.zeros(3).pin_memory()
    for wait in (torch.cuda.synchronize, torch.cuda.current_stream().synchronize, x.sum().item):
        x.add_(1)
        host.zero_().copy_(x, non_blocking=True)
        x.add_(1)  # comes after the copy
        assert host.eq(0).all()
        wait()
        assert torch.equal(host, x.cpu() - 1)
    host.copy_(x)
    assert torch.equal(host, x.cpu()), "the host waits for other copies"


def copies_of_a_side_stream_are_in_order_for_those_that_wait_for_it() -> None:
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    x, host = torch.ones(3, device="cuda"), torch.zeros(3).pin_memory()

    def copy_back_on_the_side() -> None:
        side.wait_stream(torch.cuda.current_stream())
        host.zero_()
        with torch.cuda.stream(side):
            host.copy_(x, non_blocking=True)
        event.record(side)

    copy_back_on_the_side()
    x.add_(1)
    event.synchronize()
    assert host.eq(2).all(), "this stream did not wait"
    copy_back_on_the_side()
    torch.cuda.current_stream().wait_event(event)
    x.add_(1)
    assert host.eq(0).all()
    torch.cuda.current_stream().synchronize()
    assert host.eq(2).all()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.copy_(host.fill_(7), non_blocking=True)
    _refused(x.cpu, f"stream 0 uses memory that stream {side.stream_id} has written last")
    torch.cuda.current_stream().wait_stream(side)
    assert x.cpu().eq(7).all()


def copies_of_memory_that_is_given_back_too_early_show_it() -> None:
    side, host = torch.cuda.Stream(), torch.zeros(3).pin_memory()
    x = torch.ones(3, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
    del x
    torch.cuda.synchronize()
    assert host.isnan().all()
    x = torch.ones(3, device="cuda")
    host.copy_(x, non_blocking=True)
    del x  # what takes its memory on this stream comes after the copy
    torch.cuda.synchronize()
    assert host.eq(1).all()


def work_with_memory_that_a_stream_wrote_which_its_own_did_not_wait_for_is_refused() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    host = pinned_zeros(12, "a test", "none").view(torch.float32)
    x = torch.ones(3, device="cuda")
    for use in (
        lambda: host.copy_(x, non_blocking=True),
        lambda: x.copy_(host, non_blocking=True),
        lambda: x + 1,
        lambda: x.add_(1),
    ):

        def on_second(use: Callable[[], Any] = use) -> None:
            with torch.cuda.stream(second):
                use()

        unordered = f"stream {second.stream_id} uses memory that stream {{}} has written last"
        _refused(on_second, unordered.format(0))
        first.wait_stream(torch.cuda.current_stream())
        second.wait_stream(first)
        on_second()
        first.wait_stream(second)
        with torch.cuda.stream(first):
            x.add_(1)
        _refused(on_second, unordered.format(first.stream_id))
        first.synchronize()
        on_second()
        torch.cuda.current_stream().wait_stream(second)
        x.add_(1)
    second.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(second):
        host.copy_(x, non_blocking=True)
    _refused(partial(unpin, host), f"while a copy on stream {second.stream_id} may use it")
    second.synchronize()
    unpin(host)


def memory_is_counted_by_stream_and_limited() -> None:
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.empty(1000, device="cuda")  # 4000 bytes, in blocks of 512
    assert torch.cuda.memory_allocated() == before + 4096
    del x
    y = torch.empty(1000, device="cuda")
    assert torch.cuda.memory_allocated() == before + 4096
    assert torch.cuda.memory_reserved() == reserved + 2 * 4096, "one pool for each stream"
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved + 4096
    assert torch.cuda.max_memory_allocated() >= before + 4096
    y.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == before
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(10**8, device="cuda")
    assert torch.cuda.mem_get_info()[1] == 10**8


def fresh_memory_is_nan() -> None:
    assert torch.empty(3, device="cuda").isnan().all()
    assert (torch.empty(3, dtype=torch.int64, device="cuda") == -1).all()


def large_tensors_may_be_hollow() -> None:
    pretend_gpu.install(gpus=1, gb=0.1, hollow=True)
    x = torch.empty(1 << 20, 1 << 12, dtype=torch.bfloat16, device="cuda")  # 8.6 GB
    held = torch.cuda.memory_allocated()
    product = x @ x.mT[:, : 1 << 10]
    assert product.shape == (1 << 20, 1 << 10) and product.device == x.device
    assert torch.cuda.memory_allocated() == held + product.nbytes
    assert torch.ones(3, device="cuda").sum().item() == 3, "small ones have their numbers"
