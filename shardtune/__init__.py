"""Fine-tune causal language models with FSDP. From Python: `read_run` and `plan`, which stay."""

from typing import TYPE_CHECKING, Any

from shardtune.errors import UserError

if TYPE_CHECKING:
    from shardtune.api import plan, read_run

__all__ = ["UserError", "plan", "read_run"]


def __getattr__(name: str) -> Any:
    """Import lazily: a plan needs torch, and most modules of this package do not."""
    if name in __all__:
        from shardtune import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
