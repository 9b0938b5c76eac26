"""Keep which experts a router has chosen, where a layer is computed again.

Its second forward may round otherwise than its first, and a tie then goes to another expert: ranks
that exchange tokens by these choices would then wait for tokens that never come, or receive a
number that no longer fits. So the operators by which routers choose give in the second what they
gave in the first. In a compiled layer `topk` is still called as an operator, and `max` (PhiMoE's)
is not: there a tie may end the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import noop_context_fn

_MAX, _TOP_K = torch.ops.aten.max.dim, torch.ops.aten.topk.default  # PhiMoE's, and all others'
_MOST_EXPERTS = 64  # of a token; attention chooses among keys by the hundred
_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def keep_choices(contexts: Callable[[], _Contexts] = noop_context_fn) -> _Contexts:
    """Return the contexts of a checkpointed forward and of its repetition, around these."""
    kept: list[tuple[torch.Tensor, ...]] = []
    first, again = contexts()
    return _both(_Choices(kept), first), _both(_Choices(kept, is_again=True), again)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class _Choices(TorchDispatchMode):
    supports_higher_order_operators = True  # and lets them run

    def __init__(self, kept: list[tuple[torch.Tensor, ...]], is_again: bool = False) -> None:
        super().__init__()
        self._kept, self._again = kept, iter(kept) if is_again else None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let layers be compiled: those call operators that choose, as others do."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _MAX and not (func is _TOP_K and args[1] <= _MOST_EXPERTS):
            return func(*args, **(kwargs or {}))
        if self._again:
            return next(self._again)
        chosen = func(*args, **(kwargs or {}))
        # Copies, since some routers normalise the weights of their choices in place.
        self._kept.append(tuple(x.clone() for x in chosen))
        return chosen
