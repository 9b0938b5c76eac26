"""The optimizers by name. One more is a class here, in `RULES`, and a name in the configuration."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from shardtune.errors import UserError
from shardtune.optimizers.rounding import (
    SCALE_BLOCK,
    CodeTable,
    dequantize,
    in_blocks,
    noise_bits,
    quantize,
    store_rounded,
)

Tensors = Mapping[str, torch.Tensor]


class State(NamedTuple):
    """A tensor that an optimizer keeps of a weight: it has the weight's shape, or one number a
    block."""

    dtype: torch.dtype
    is_per_block: bool = False

    def length(self, width: int) -> int:
        """Return its last dimension. `width`: the weight's."""
        return -(-width // SCALE_BLOCK) if self.is_per_block else width


class UpdateRule(ABC):
    """An optimizer: the states that it keeps of each weight, and their update. It has no instances.

    Attributes:
        name: that of `optimizer.name`.
        masters: dtypes of the weights that it updates.
        hyperparameters: the keys of `optimizer` that it reads beside `lr` and `weight_decay`.
        price: the drawback, in words, of an optimizer that saves memory; empty for others.
        has_blocks: no rank's part of a matrix may cut a block of SCALE_BLOCK columns.
        is_fused: a kernel of PyTorch's updates many weights. Any other rule is compiled where that
            works.
        eager_numbers: float32 scratch values per element of an eager update.
    """

    name: str
    masters: Sequence[str] = ("float32", "bfloat16")
    hyperparameters: Sequence[str] = ()
    price = ""
    has_blocks = False
    is_fused = False
    eager_numbers: int

    @classmethod
    @abstractmethod
    def states(cls, master: torch.dtype, is_matrix: bool = True) -> dict[str, State]:
        """Return the states of a weight, at most three, by their names in a checkpoint."""

    @classmethod
    def bytes_per_element(cls, master: str) -> float:
        """Return the bytes of the states of an element of a matrix."""
        states = cls.states(getattr(torch, master)).values()
        return sum(s.dtype.itemsize * s.length(SCALE_BLOCK) for s in states) / SCALE_BLOCK

    @classmethod
    def eager_bytes(cls, rows: int, width: int, is_matrix: bool) -> int:
        """Return the bytes of scratch of an eager update of some rows."""
        return 4 * cls.eager_numbers * rows * width

    @staticmethod
    @abstractmethod
    def factors(group: Mapping[str, Any], step: int, scale: float, device: torch.device) -> Any:
        """Return the numbers of a step. `scale` multiplies each gradient, in float32.

        They are float32 scalars on the device: a new value needs no new compilation.
        """

    @staticmethod
    @abstractmethod
    def update(
        tensors: Any,
        factors: Any,
        rows: torch.Tensor,
        columns: torch.Tensor,
        key: torch.Tensor,
        tables: tuple[CodeTable, CodeTable],
    ) -> None:
        """Update some rows of a weight and its states in place.

        Args:
            tensors: weight, gradient and states [rows, columns or blocks]. A fused rule gets a list
                of these, of several weights, and nothing else but the factors.
            factors: what `factors` has returned.
            rows, columns: their numbers in the whole tensor, int64 [rows] and int32 [columns].
            key: keys of the noise of the weight and of up to three states, int32 [4].
            tables: the codes of 8 bits of a state with signs and of one without.
        """


class AdamWFactors(NamedTuple):
    """The numbers of one step of AdamW."""

    shrink: torch.Tensor  # 1 - lr x weight decay
    rate: torch.Tensor  # lr / (1 - beta1 ** step)
    root: torch.Tensor  # sqrt(1 - beta2 ** step)
    new1: torch.Tensor  # 1 - beta1
    new2: torch.Tensor  # 1 - beta2
    eps: torch.Tensor
    gradient: torch.Tensor  # by which the gradient is multiplied


class AdamW(UpdateRule):
    """AdamW, rounded at random to weights and moments of bfloat16. The arithmetic is float32."""

    name = "adamw"
    masters: Sequence[str] = ("bfloat16",)
    hyperparameters = ("betas", "eps")
    eager_numbers = 7

    @classmethod
    def states(cls, master: torch.dtype, is_matrix: bool = True) -> dict[str, State]:
        return dict.fromkeys(("exp_avg", "exp_avg_sq"), State(master))

    @staticmethod
    def factors(
        group: Mapping[str, Any], step: int, scale: float, device: torch.device
    ) -> AdamWFactors:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        values = (
            1 - lr * group["weight_decay"],
            lr / (1 - beta1**step),
            (1 - beta2**step) ** 0.5,
            1 - beta1,
            1 - beta2,
            group["eps"],
            scale,
        )
        # Filled on the device: the host would wait for a copy.
        return AdamWFactors(
            *(torch.full((), v, dtype=torch.float32, device=device) for v in values)
        )

    @staticmethod
    def update(
        tensors: Tensors,
        factors: AdamWFactors,
        rows: torch.Tensor,
        columns: torch.Tensor,
        key: torch.Tensor,
        tables: tuple[CodeTable, CodeTable],
    ) -> None:
        """Update by the formula of torch.optim.AdamW."""
        noise = partial(noise_bits, rows, columns)
        first, second = _new_moments(tensors, factors, tables)
        # Not sqrt, whose last bit on a CPU depends on the library and on the place in memory.
        change = first / (1 / (second.rsqrt() * factors.root) + factors.eps)
        weight = tensors["weight"].float() * factors.shrink - change * factors.rate
        store_rounded(tensors["weight"], weight, noise(key[0]))
        del change, weight  # an eager update needs the memory
        if "exp_avg_scale" not in tensors:
            store_rounded(tensors["exp_avg"], first, noise(key[1]))
            store_rounded(tensors["exp_avg_sq"], second, noise(key[2]))
            return
        if torch.compiler.is_compiling():
            # The moments are computed again. A compiled update would otherwise write both in
            # float32, and read them back when it knows the largest of each block.
            blocks = {
                name: tensor[:, :, None] if name.endswith("scale") else in_blocks(tensor)
                for name, tensor in tensors.items()
            }
            largest = [moment.abs().amax(-1) for moment in _new_moments(blocks, factors, tables)]
        else:
            largest = [in_blocks(moment.abs()).amax(-1) for moment in (first, second)]
        # A squared gradient that became 0 would make the next update as large as 1 / eps.
        floor = tables[1].sizes[1]
        tensors["exp_avg"].copy_(quantize(first, largest[0], noise(key[1]), tables[0]))
        tensors["exp_avg_sq"].copy_(quantize(second, largest[1], noise(key[2]), tables[1], floor))
        tensors["exp_avg_scale"].copy_(largest[0])
        tensors["exp_avg_sq_scale"].copy_(largest[1])


class AdamW8bit(AdamW):
    """AdamW whose moments of a matrix have 8 bits, and a float32 scale per block.

    The moments of norms and biases, which take little memory, keep the weight's dtype.
    """

    name = "adamw8bit"
    masters: Sequence[str] = ("float32", "bfloat16")
    price = "moments of 8 bits"
    has_blocks = True

    @classmethod
    def states(cls, master: torch.dtype, is_matrix: bool = True) -> dict[str, State]:
        moments = super().states(torch.uint8 if is_matrix else master)
        scales = {f"{name}_scale": State(torch.float32, is_per_block=True) for name in moments}
        return moments | scales if is_matrix else moments

    @classmethod
    def eager_bytes(cls, rows: int, width: int, is_matrix: bool) -> int:
        if not is_matrix:
            return super().eager_bytes(rows, width, is_matrix)
        return 4 * 12 * rows * -(-width // SCALE_BLOCK) * SCALE_BLOCK


class FusedAdamW(AdamW):
    """AdamW of float32 weights and moments, as torch.optim.AdamW(fused=True) updates them."""

    masters = ("float32",)
    is_fused = True
    eager_numbers = 0

    @staticmethod
    def factors(group: Mapping[str, Any], step: int, scale: float, device: torch.device) -> Any:
        return group, torch.full((), step, dtype=torch.float32, device=device), scale

    @staticmethod
    def update(tensors: Any, factors: Any, *_: Any) -> None:
        group, step, scale = factors
        names = ("weight", "gradient", "exp_avg", "exp_avg_sq")
        weights, gradients, first, second = ([x[name] for x in tensors] for name in names)
        if scale < 1:  # PyTorch's own scale divides, so that the last bits would be others
            torch._foreach_mul_(gradients, scale)
        torch._fused_adamw_(
            weights,
            gradients,
            first,
            second,
            [],
            [step] * len(weights),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def _new_moments(
    tensors: Tensors, factors: AdamWFactors, tables: tuple[CodeTable, CodeTable]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both moments after this step's gradient, in float32."""
    gradient = tensors["gradient"].float() * factors.gradient
    if "exp_avg_scale" in tensors:
        first = dequantize(tensors["exp_avg"], tensors["exp_avg_scale"], tables[0])
        second = dequantize(tensors["exp_avg_sq"], tensors["exp_avg_sq_scale"], tables[1])
    else:
        first, second = tensors["exp_avg"].float(), tensors["exp_avg_sq"].float()
    first = first + (gradient - first) * factors.new1
    return first, second + (gradient * gradient - second) * factors.new2


RULES: Sequence[type[UpdateRule]] = (AdamW, FusedAdamW, AdamW8bit)


def find_rule(name: str, master: str) -> type[UpdateRule]:
    """Return the optimizer of this name that updates weights of this dtype.

    Raises:
        UserError: there is none.
    """
    named = [rule for rule in RULES if rule.name == name]
    for rule in named:
        if master in rule.masters:
            return rule
    dtypes = " or ".join(dict.fromkeys(dtype for rule in named for dtype in rule.masters))
    raise UserError(
        f"optimizer.name={name} does not update {master} weights - use model.master_dtype={dtypes}"
    )


def updates(name: str, master: str) -> bool:
    """Return whether an optimizer of this name updates weights of this dtype."""
    return any(rule.name == name and master in rule.masters for rule in RULES)


def smaller_rules(name: str, master: str) -> list[type[UpdateRule]]:
    """Return the optimizers that may take the place of one to save memory."""
    now = find_rule(name, master).bytes_per_element(master)
    rules = (rule for rule in RULES if rule.price and master in rule.masters)
    return [rule for rule in rules if rule.bytes_per_element(master) < now]
