"""Stochastic rounding, moments of 8 bits, the update against PyTorch's, groups, rates and norms."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from helpers.configs import load
from torch import nn
from torch._inductor import config as inductor
from transformers import AutoModelForCausalLM

from shardtune.config import OptimizerConfig, SchedulerConfig
from shardtune.distributed.layout import Layout
from shardtune.errors import RunFailed
from shardtune.optimizers import rounding
from shardtune.optimizers.rounding import code_tables, magnitudes
from shardtune.optimizers.rules import RULES, AdamW, AdamW8bit, FusedAdamW, find_rule
from shardtune.training.optim import (
    build_optimizer,
    clip_gradients,
    compile_update,
    first_non_finite,
    learning_rate,
    set_learning_rate,
    squared_gradients,
)
from shardtune.training.states import host_states, sharded_optimizer
from shardtune.training.states.replica_shards import OwnedParameters
from shardtune.training.states.sharded_optimizer import ShardedOptimizer

CPU = torch.device("cpu")
LOW_PRECISION = pytest.mark.parametrize(
    ("dtype", "eight_bit"),
    [(torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)],
)


def optimizer_of(
    *weights: torch.Tensor, eight_bit: bool = False, seed: int = 1, **given: Any
) -> ShardedOptimizer:
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8} | given
    named = [(f"weight{i}", weight) for i, weight in enumerate(weights)]
    for weight in weights:
        weight.grad_dtype = torch.float32  # as the model's are
    decay = settings.pop("weight_decay", 0.0)
    groups, rule = [{"params": named, "weight_decay": decay}], AdamW8bit if eight_bit else AdamW
    return ShardedOptimizer(groups, rule, seed, **settings)


def noise(rows: int, columns: int, step: int = 1, name: str = "w", seed: int = 0) -> torch.Tensor:
    """Return the upper 16 bits of each element's noise."""
    return (noise_bits(rows, columns, noise_key(seed, step, name)).long() >> 16) & 0xFFFF


def noise_key(seed: int, step: int, name: str = "w") -> torch.Tensor:
    return rounding.noise_keys(seed, step, [name], CPU)[0, 0]


def noise_bits(rows: int, columns: int, key: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(columns, dtype=torch.int32)
    return rounding.noise_bits(torch.arange(rows), numbers, key)


def test_rounding_is_right_on_average_and_only_to_a_neighbour():
    """The mean of 32 million roundings; nearest rounding would give 1 or 1 + 1/128."""
    for value in (1 + 1e-3, -1 - 3e-3, 1e-30, -0.2):
        exact = torch.full((1000, 1000), value)
        total, seen = torch.zeros((), dtype=torch.float64), set()
        for step in range(8):
            target = torch.empty_like(exact, dtype=torch.bfloat16)
            rounding.store_rounded(target, exact, noise_bits(1000, 1000, noise_key(3, step)))
            total += target.double().mean()
            seen |= set(target.unique().tolist())
        low, high = min(seen), max(seen)
        assert len(seen) == 2 and low < value < high
        # Five standard deviations of a mean of 8 million.
        assert abs(total / 8 - exact[0, 0].double()) < 5 * (high - low) / 2 / 8e6**0.5
    exact_in_bfloat16 = torch.randn(64, 64).bfloat16()
    target = torch.empty_like(exact_in_bfloat16)
    rounding.store_rounded(target, exact_in_bfloat16.float(), noise(64, 64).int() << 16)
    assert torch.equal(target, exact_in_bfloat16)


def test_noise_differs_by_element_step_tensor_and_seed_and_is_even():
    first = noise(512, 512)
    others = [noise(512, 512, step=2), noise(512, 512, name="v"), noise(512, 512, seed=1)]
    others += [first.roll(1, 0), first.roll(1, 1), first.T]
    centred = first.double() - 32767.5
    for other in others:
        correlation = (centred * (other.double() - 32767.5)).mean() / (65536**2 / 12)
        assert abs(correlation) < 5 / 512
    for bit in range(16):
        assert abs(((first >> bit) & 1).double().mean() - 0.5) < 5 / 1024
    counts = torch.bincount((first >> 8).flatten(), minlength=256).double()
    assert ((counts - 1024).square() / 1024).sum() < 255 + 6 * (2 * 255) ** 0.5


def test_elements_beyond_32_bits_have_noise_of_their_own():
    """A stack of experts may have more than 2 ** 32 elements, and rows."""
    key, columns = noise_key(0, 1), torch.arange(64, dtype=torch.int32)
    near, far = torch.arange(64), torch.arange(64) + 2**32
    assert not torch.equal(
        rounding.noise_bits(near, columns, key),
        rounding.noise_bits(far, columns, key),
    )
    box = sharded_optimizer._row_numbers(((2, 5, 9), (3, 1, 4)), CPU)
    assert box.tolist() == [21, 22, 23, 25, 26, 27]


@pytest.mark.parametrize("eight_bit", [False, True])
def test_300_updates_of_a_millionth_move_a_weight_of_one(eight_bit):
    """Each is a thousandth of the spacing of bfloat16 there."""
    weight = torch.ones(128, 512, dtype=torch.bfloat16)
    optimizer = optimizer_of(weight, lr=1e-6, eight_bit=eight_bit)
    for _ in range(300):
        weight.grad = torch.ones_like(weight, dtype=torch.float32)
        optimizer.step()
    # The mean's standard deviation: a share of 0.04 of the weights is 1/128 or 1/256 lower.
    assert weight.double().mean() - 1 == pytest.approx(-3e-4, abs=5 * 0.2 * 2**-8 / 65536**0.5)


@pytest.mark.parametrize("bits", [7, 8])
def test_codes_are_a_dynamic_map_and_their_lookup_is_a_search(bits):
    values = magnitudes(bits)
    assert len(values) == 2**bits and values[0] == 0 and values[-1] == 1
    assert (values.diff() > 0).all()
    decades = [
        ((values > 10.0**k * 0.9999) & (values < 10.0 ** (k + 1) * 0.9999)).sum().item()
        for k in range(-3, 0)
    ]
    assert decades == [2 ** (bits - 3), 2 ** (bits - 2), 2 ** (bits - 1)]
    shares = torch.cat([torch.rand(100_000), 10 ** (-10 * torch.rand(100_000)), values])
    lower = rounding.lower_codes(values)[shares.view(torch.int32) >> 16]
    lower = lower.clamp(max=len(values) - 2)
    lower = lower + (shares >= values[lower + 1]).int()
    assert torch.equal(lower, torch.bucketize(shares, values, right=True, out_int32=True) - 1)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("width", [768, 517])
def test_moments_of_8_bits_are_right_on_average_and_within_a_code(signed, width):
    """Each block of 256, and a rest, has a scale of its own."""
    table = code_tables(CPU)[0 if signed else 1]
    sizes = torch.logspace(-6, 3, 12).view(4, 3).repeat_interleave(256, dim=1)[:, :width]
    value = torch.randn(4, width) * sizes
    value[0, 259] = 0
    value = value if signed else value.square()
    scale = torch.stack([block.abs().amax(-1) for block in value.split(256, dim=1)], dim=1)
    total = torch.zeros(value.shape, dtype=torch.float64)
    for step in range(1000):
        bits = noise_bits(4, width, noise_key(0, step))
        codes = rounding.quantize(value, scale, bits, table).to(torch.uint8)
        back = rounding.dequantize(codes, scale, table)
        total += back.double()
    # The widest spacing of codes: of the uppermost decade, by the number of its codes.
    spacing = 0.9 / (64 if signed else 128) * scale.repeat_interleave(256, dim=1)[:, :width]
    assert ((back - value).abs() <= spacing).all() and back[0, 259] == 0
    assert ((total / 1000 - value).abs() <= 6 * spacing / 2 / 1000**0.5 + 1e-12).all()


@pytest.mark.parametrize("width", [512, 600, 100])
def test_each_block_and_a_rest_has_the_scale_of_its_largest(width):
    weight = torch.zeros(3, width)
    optimizer = optimizer_of(weight, eight_bit=True, betas=(0.5, 0.75))
    weight.grad = torch.randn(3, width)
    optimizer.step()
    blocks = weight.grad.abs().split(256, dim=1)
    largest = torch.stack([block.amax(1) for block in blocks], dim=1)
    state = optimizer.state[weight]
    assert torch.equal(state["exp_avg_scale"], largest / 2)
    assert torch.equal(state["exp_avg_sq_scale"], largest.square() / 4)


def test_a_second_moment_above_0_does_not_become_0():
    """The update would be as large as 1 / eps."""
    weight = torch.zeros(2, 256)
    optimizer = optimizer_of(weight, eight_bit=True)
    weight.grad = torch.full((2, 256), 1e-5)
    weight.grad[:, 0] = 1.0
    for _ in range(20):
        optimizer.step()
    assert weight.abs().max() <= 20 * 1.01e-3
    weight.grad = torch.zeros(2, 256)
    weight.grad[0, 0] = 1e-30  # its square is 0
    optimizer.step()
    assert weight.isfinite().all()


def losses_of(optimizer: torch.optim.Optimizer, weights: list[torch.Tensor]) -> list[float]:
    """Fit a matrix and a vector to a target, by gradients with the same noise each time."""
    source = torch.Generator().manual_seed(3)
    target = torch.randn(48, 300, generator=source)
    losses = []
    for _ in range(200):
        matrix, vector = weights
        error = matrix.float() + vector.float() - target
        losses.append(error.square().mean().item())
        gradient = error + 0.1 * torch.randn(error.shape, generator=source)
        matrix.grad, vector.grad = gradient, gradient.sum(0)
        optimizer.step()
    return losses


@LOW_PRECISION
def test_adamw_in_low_precision_learns_as_pytorchs_in_float32(dtype, eight_bit):
    given: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}

    def run(dtype: torch.dtype, make: Any) -> list[float]:
        weights = [torch.zeros(48, 300, dtype=dtype), torch.zeros(300, dtype=dtype)]
        return losses_of(make(weights), weights)

    exact = run(torch.float32, lambda w: torch.optim.AdamW(w, betas=(0.9, 0.95), eps=1e-8, **given))
    ours = run(dtype, lambda w: optimizer_of(*w, eight_bit=eight_bit, **given))
    assert exact[-1] < 0.75 * exact[0]
    assert ours == pytest.approx(exact, rel=3e-3)


def test_the_update_in_float32_is_pytorchs():
    """Moments of vectors are float32, so nothing is rounded. A second group has no decay."""
    ours, plain = torch.ones(2, 300).unbind(), torch.ones(2, 300).unbind()
    given: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = optimizer_of(ours[0], eight_bit=True, **given)
    optimizer.add_param_group({"params": [("undecayed", ours[1])]})
    oracle = torch.optim.AdamW([plain[0]], betas=(0.9, 0.95), eps=1e-8, **given)
    oracle.add_param_group({"params": [plain[1]], "weight_decay": 0.0})
    for step in range(20):
        torch.manual_seed(step)
        for mine, theirs in zip(ours, plain, strict=True):
            mine.grad = theirs.grad = torch.randn(300)
        optimizer.step()
        oracle.step()
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)


def stepped(
    sizes: tuple[int, ...], dtype: torch.dtype, compiled: bool = False, **given: Any
) -> list[torch.Tensor]:
    """Return a weight and its state after three steps."""
    torch.manual_seed(0)
    weight = torch.randn(sizes).to(dtype)
    optimizer = optimizer_of(weight, weight_decay=0.1, **given)
    if compiled:
        optimizer.compile_update()
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        weight.grad = torch.randn(sizes)
        optimizer.step()
    return [weight, *optimizer.state[weight].values()]


@pytest.mark.parametrize("eight_bit", [False, True])
def test_pieces_of_a_tensor_change_nothing(eight_bit, monkeypatch):
    whole = stepped((3, 50, 300), torch.bfloat16, eight_bit=eight_bit)
    monkeypatch.setattr(host_states, "PIECE", 4000)
    pieces = stepped((3, 50, 300), torch.bfloat16, eight_bit=eight_bit)
    assert all(map(torch.equal, whole, pieces))
    assert not torch.equal(
        whole[0], stepped((3, 50, 300), torch.bfloat16, eight_bit=eight_bit, seed=2)[0]
    )


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "eight_bit"), [(torch.float32, True), (torch.bfloat16, False)])
def test_the_compiled_update_is_the_eager_one_to_the_last_bit(dtype, eight_bit, monkeypatch):
    monkeypatch.setattr(sharded_optimizer, "_COMPILED_PIECE", 9000)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for sizes in ((37, 600), (3, 50, 512), (700,), (41, 856)):
        eager = stepped(sizes, dtype, eight_bit=eight_bit)
        compiled = stepped(sizes, dtype, eight_bit=eight_bit, compiled=True)
        assert all(map(torch.equal, eager, compiled)), sizes
    # With and without a rest, of one block, of one row: not one for each size or rate.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8


def test_a_compiled_update_of_many_experts_is_one_call():
    """16 of GLM-4.5-Air's 128 experts on a rank; a kernel's indices have 32 bits."""
    optimizer = optimizer_of(torch.zeros(2, 2), eight_bit=True)
    assert optimizer.piece_rows(4096) * 4096 <= host_states.PIECE
    optimizer.is_compiled = True
    assert 16 * 2816 <= optimizer.piece_rows(4096) < 2**31 // 4096
    assert optimizer.piece_rows(1408) % 16 == 0, "the next piece begins where kernels read aligned"


@pytest.mark.full
def test_steps_compile_nothing_anew(monkeypatch):
    """The first step has a time limit, and a graph that fails in a later one would end the run."""
    monkeypatch.setattr(sharded_optimizer, "_COMPILED_PIECE", 30_000)
    # Graphs are counted, and kernels would take a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    sizes = [(37, 600), (100, 2048), (600, 600), (1, 512), (9, 100), (2048,)]
    weights = [torch.nn.Parameter(torch.randn(each).bfloat16()) for each in sizes]
    optimizer = optimizer_of(*weights, eight_bit=True)
    torch._dynamo.reset()
    optimizer.compile_update()
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape)
        optimizer.step()
    assert optimizer.is_compiled
    assert not torch._dynamo.utils.counters["stats"]


@pytest.mark.parametrize(
    ("dtype", "eight_bit", "moments"),
    [(torch.bfloat16, False, 4), (torch.bfloat16, True, 2), (torch.float32, True, 2)],
)
def test_the_optimizers_states_take_the_bytes_that_are_said(dtype, eight_bit, moments):
    matrix, vector = torch.zeros(3, 4, 700, dtype=dtype), torch.zeros(700, dtype=dtype)
    optimizer = optimizer_of(matrix, vector, eight_bit=eight_bit)
    for weight in (matrix, vector):
        weight.grad = torch.ones_like(weight, dtype=torch.float32)
    optimizer.step()
    scales = 2 * 4 * 12 * 3 if eight_bit else 0  # 700 elements are three blocks
    expected = {matrix: moments * 8400 + scales, vector: 2 * dtype.itemsize * 700}
    for weight, size in expected.items():
        state = optimizer.state[weight]
        assert sum(t.numel() * t.itemsize for t in state.values()) == size + 4
        assert sum(optimizer.state_sizes(weight)) == size


@pytest.mark.parametrize("eight_bit", [False, True])
def test_weight_and_moments_are_rounded_independently(eight_bit):
    """Each is equal everywhere before it is rounded, up in some places and down in the others."""
    for size in torch.linspace(0.3, 0.9, 60).tolist():
        weight = torch.ones(64, 256, dtype=torch.bfloat16)
        weight.requires_grad_(True)
        optimizer = optimizer_of(weight, eight_bit=eight_bit, lr=2e-3)
        weight.grad = torch.full((64, 256), size)
        weight.grad[:, 0] = 1.0  # the scale of each block of 8 bits
        optimizer.step()
        state = optimizer.state[weight]
        stored = [weight.detach(), state["exp_avg"], state["exp_avg_sq"]]
        is_up = torch.stack([(t == t[:, 1:].max())[:, 1:].flatten() for t in stored]).double()
        if all(0.3 < share < 0.7 for share in is_up.mean(1)):
            break
    else:
        pytest.fail("no size of the gradients lies between two stored values of all three")
    correlations = torch.corrcoef(is_up) - torch.eye(3, dtype=torch.float64)
    assert correlations.abs().max() < 0.05  # six standard deviations


# 12 steps, of which ceil(0.3 x 12) = 4 warm up, then 8 fall from 8e-4 to a tenth of that.
HALF_COSINE = [(1 + math.cos(math.pi * eighths / 8)) / 2 for eighths in range(1, 9)]
FALLING = {
    "constant": [8e-4] * 8,
    "linear": [7.1e-4, 6.2e-4, 5.3e-4, 4.4e-4, 3.5e-4, 2.6e-4, 1.7e-4, 8e-5],
    "cosine": [8e-5 + 7.2e-4 * share for share in HALF_COSINE],
}


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_the_rate_warms_up_and_falls_to_its_minimum_at_the_last_step(name):
    config = SchedulerConfig(name=name, warmup_ratio=0.3, min_lr_ratio=0.1)
    rates = [learning_rate(step, 12, 8e-4, config) for step in range(1, 13)]
    assert rates == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, *FALLING[name]], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "warmup", "total", "first", "last"),
    [
        ("constant", 0.0, 1, 1.0, 1.0),
        ("cosine", 0.0, 1, 0.1, 0.1),
        ("linear", 0.0, 1, 0.1, 0.1),
        ("cosine", 1.0, 4, 0.25, 1.0),
        ("linear", 0.03, 1, 1.0, 1.0),
    ],
)
def test_the_rate_of_a_run_of_few_steps_still_ends_at_its_minimum(name, warmup, total, first, last):
    config = SchedulerConfig(name=name, warmup_ratio=warmup, min_lr_ratio=0.1)
    assert learning_rate(1, total, 1.0, config) == pytest.approx(first)
    assert learning_rate(total, total, 1.0, config) == pytest.approx(last)


def test_each_name_that_a_configuration_may_have_is_an_optimizer_of_each_dtype():
    names = get_args(OptimizerConfig.model_fields["name"].annotation)
    assert {rule.name for rule in RULES} == set(names)
    found = [find_rule(name, dtype) for name in names for dtype in ("float32", "bfloat16")]
    assert set(found) == set(RULES)


def test_decay_reaches_matrices_and_neither_norms_nor_biases(models, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(models["qwen3"])
    given = ["lr=1e-3", "betas=[0.5,0.75]", "eps=1e-3", "weight_decay=0.2"]
    config = load(tmp_path, *(f"optimizer.{each}" for each in given))
    alone: Any = SimpleNamespace(layout=Layout.of(config))
    optimizer = build_optimizer(OwnedParameters(model, alone), config)
    names = {p: name for name, p in model.named_parameters()}
    matrices, norms = (
        {names[p] for p in group["params"]}
        for group in sorted(optimizer.param_groups, key=lambda group: -group["weight_decay"])
    )
    assert norms == {name for name in names.values() if "norm" in name}
    assert matrices | norms == set(names.values()) and not matrices & norms
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0]
    assert {(group["betas"], group["eps"], group["lr"]) for group in optimizer.param_groups} == {
        ((0.5, 0.75), 1e-3, 1e-3)
    }
    set_learning_rate(optimizer, 0.125)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}


def test_the_norm_of_a_large_gradient_is_exact():
    """The float32 norm of PyTorch on a CPU is off by 0.2% here."""
    large = nn.Linear(5000, 6000, bias=False)
    large.weight.grad = 1 + torch.rand(6000, 5000)
    exact = sum(row.double().square().sum().item() for row in large.weight.grad)
    assert squared_gradients(large.parameters()).item() == pytest.approx(exact, rel=1e-12)


def test_a_weight_that_is_not_finite_is_named_before_all_gradients():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.grad = torch.full((2, 2), float("nan"))
    parameters = dict(model.named_parameters())
    assert first_non_finite(model, parameters)[2] == "the gradient of 0.weight"
    with torch.no_grad():
        model[1].bias[0] = float("inf")
    assert first_non_finite(model, parameters)[2] == "the weight 1.bias"


def weights_and_optimizer(rule: Any, dtype: torch.dtype) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(8, 300)), nn.Parameter(torch.randn(300))]
    given: Any = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    for weight in weights:
        weight.grad_dtype = dtype
        weight.grad = torch.randn(weight.shape).to(dtype)
    if rule is torch.optim.AdamW:
        return weights, rule(weights, fused=True, **given)
    group = {"params": [(f"w{i}", weight) for i, weight in enumerate(weights)]}
    return weights, ShardedOptimizer([group], rule, seed=1, **given)


@pytest.mark.parametrize(
    ("rule", "oracle"), [(FusedAdamW, torch.optim.AdamW), (AdamW8bit, AdamW8bit)]
)
@pytest.mark.parametrize("share", [0.01, 0.5, 0.7, 0.99, 20.0])
def test_a_clipped_update_is_that_of_gradients_which_pytorch_clips(rule, oracle, share):
    """To the bit; moments of 8 bits and the next step see the clipped gradients alone."""
    expected, plain = weights_and_optimizer(oracle, torch.float32)
    weights, optimizer = weights_and_optimizer(rule, torch.float32)
    for _ in range(2):
        norm = math.sqrt(squared_gradients(weights).item())
        max_norm = share * norm
        torch.nn.utils.clip_grads_with_norm_(expected, max_norm, torch.tensor(norm))
        plain.step()
        clip_gradients(optimizer, max_norm, norm)
        optimizer.step()
        assert all(map(torch.equal, weights, expected))
        for before, after in zip(expected, weights, strict=True):
            before.grad = torch.randn(before.shape)
            after.grad = before.grad.clone()


def test_gradients_of_bfloat16_are_clipped_in_float32_and_not_rewritten():
    """Written back, each would be rounded once more."""
    weights, optimizer = weights_and_optimizer(AdamW8bit, torch.bfloat16)
    exact, in_float32 = weights_and_optimizer(AdamW8bit, torch.float32)
    for weight, other in zip(weights, exact, strict=True):
        other.grad = weight.grad.float()
    before = [weight.grad.clone() for weight in weights]
    norm = math.sqrt(squared_gradients(weights).item())
    clip_gradients(optimizer, 0.3, norm)
    optimizer.step()
    torch.nn.utils.clip_grads_with_norm_(exact, 0.3, torch.tensor(norm))
    in_float32.step()
    assert all(map(torch.equal, weights, exact))
    assert all(torch.equal(weight.grad, old) for weight, old in zip(weights, before, strict=True))


@pytest.mark.full
def test_a_compile_that_was_asked_for_and_fails_names_the_optimizer(tmp_path):
    _, optimizer = weights_and_optimizer(AdamW8bit, torch.float32)
    alone: Any = SimpleNamespace(device=torch.device("cpu"), all_gather_json=lambda value: [value])
    compile_update(optimizer, load(tmp_path), alone)
    assert not optimizer.is_compiled
    config = load(tmp_path, "model.compile=true")
    with (
        inductor.patch({"cpp.cxx": ("/nowhere/c++",), "force_disable_caches": True}),
        pytest.raises(RunFailed, match=r"^model\.compile=true: the optimizer cannot be .+ - "),
    ):
        compile_update(optimizer, config, alone)
    assert not optimizer.is_compiled
