"""Keep the experts that a router has chosen, where a layer is computed again.

The second forward of a layer may round otherwise than the first, and a tie then goes to another
expert: ranks that exchange tokens would wait for tokens that never come, or receive more than they
expect. So in the second forward the operators of routers return what they returned in the first. A
compiled layer still calls `topk` as an operator, but not `max` (PhiMoE's): there a tie may end the
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import noop_context_fn

_MAX, _TOP_K = torch.ops.aten.max.dim, torch.ops.aten.topk.default  # PhiMoE's routers, all others
_MOST_EXPERTS = 64  # a larger `topk` chooses attention's keys, not experts
_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def keep_choices(contexts: Callable[[], _Contexts] = noop_context_fn) -> _Contexts:
    """Return `contexts` of a checkpointed forward and its repetition that keep choices, too."""
    # Both share one list: the repetition takes the choices in the order in which the forward made
    # them.
    kept: list[tuple[torch.Tensor, ...]] = []
    first, again = contexts()
    return _both(_Choices(kept), first), _both(_Choices(kept, is_again=True), again)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class _Choices(TorchDispatchMode):
    supports_higher_order_operators = True  # else torch refuses them within this mode

    def __init__(self, kept: list[tuple[torch.Tensor, ...]], is_again: bool = False) -> None:
        super().__init__()
        self._kept, self._again = kept, iter(kept) if is_again else None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Allow compiled layers within this mode: they call `topk` as an operator, too."""
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
