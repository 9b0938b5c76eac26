"""Values in the launcher's store, by which processes agree even if one comes hours later."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Sequence
from typing import Any, cast

import torch.distributed as dist

_VALUE_BYTES = 4 << 20  # the store refuses more than 8 MiB


def wait_for(store: dist.Store, keys: Sequence[str], timeout_s: float) -> None:
    """Poll until all keys are in the store. The store's own wait would not react to signals.

    Raises TimeoutError.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no word under {keys[0]} within {timeout_s:.0f} s")
        time.sleep(pause_s)
        pause_s = min(0.2, 1.5 * pause_s)


def set_value(store: dist.Store, key: str, value: Any) -> None:
    """Leave a JSON-able value in pieces that the store takes; `key` itself appears last."""
    packed = zlib.compress(json.dumps(value).encode(), level=1)
    pieces = [packed[start : start + _VALUE_BYTES] for start in range(0, len(packed), _VALUE_BYTES)]
    for number, piece in enumerate(pieces):
        cast(Any, store).set(f"{key}/{number}", piece)  # bytes, which its type hints do not know
    store.set(key, str(len(pieces)))


def get_value(store: dist.Store, key: str) -> Any:
    pieces = [store.get(f"{key}/{number}") for number in range(int(store.get(key)))]
    return json.loads(zlib.decompress(b"".join(pieces)))


def delete_value(store: dist.Store, key: str) -> None:
    """Delete the value under `key`, if there is one: its memory is the launcher's."""
    if store.check([key]):
        for number in range(int(store.get(key))):
            store.delete_key(f"{key}/{number}")
        store.delete_key(key)
