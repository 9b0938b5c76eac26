"""`torch.cuda`, and what else the CPU build lacks of its Python parts."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

_NAME, _CAPABILITY = "NVIDIA H100 80GB HBM3", (9, 0)
_OPS = torch.ops.pretend


class Stream(torch.Stream):
    """`torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **numbers: int) -> Stream:
        if numbers:
            return super().__new__(cls, **numbers)
        return super().__new__(cls, torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    """`torch.cuda.Event`."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: bool) -> Event:
        return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)


def _index(device: Any = None) -> int:
    if isinstance(device, int) and device >= 0:
        return device
    index = None if device is None or isinstance(device, int) else torch.device(device).index
    return _OPS.device() if index is None else index


class OnDevice:
    """`torch.cuda.device`: a class, since Dynamo asks whether a value is one."""

    def __init__(self, device: Any) -> None:
        self._device = None if device is None else _index(device)

    def __enter__(self) -> None:
        self._before = _OPS.device()
        if self._device is not None:
            _OPS.set_device(self._device)

    def __exit__(self, *_: Any) -> None:
        _OPS.set_device(self._before)


class OnStream:
    """`torch.cuda.StreamContext`."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = torch.accelerator.current_stream(self._stream.device)
            torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_: Any) -> None:
        if self._stream is not None:
            torch.accelerator.set_stream(self._before)


def _stream_of(stream: torch.Stream) -> Stream:
    numbers = {"stream_id": stream.stream_id, "device_index": stream.device_index}
    return Stream(**numbers, device_type=stream.device_type)


def _memory(device: Any = None) -> tuple[int, int, int]:
    """Return the bytes that are held, the most so far, and those that are reserved."""
    held, peak, pools = _OPS.memory(_index(device))
    return held, peak, sum(pools.values())


def _total() -> int:
    return int(_OPS.bytes_per_gpu())


def _free_and_total(device: Any = None) -> tuple[int, int]:
    """Return what `cudaMemGetInfo` does."""
    return _total() - _memory(device)[2], _total()


def _properties(device: Any = None) -> SimpleNamespace:
    major, minor = _CAPABILITY
    numbers = {"total_memory": _total(), "multi_processor_count": 132}
    return SimpleNamespace(name=_NAME, major=major, minor=minor, **numbers)


def _synchronize(device: Any = None) -> None:
    _OPS.synchronize(_index(device))


def _seed(seed: int) -> None:
    _OPS.seed(_OPS.device(), seed % 2**63)


def _seed_all(seed: int) -> None:
    for device in range(_OPS.gpus()):
        _OPS.seed(device, seed % 2**63)


def _dump_snapshot(filename: str = "dump_snapshot.pickle", *_: Any) -> None:
    """Write what a process has that allocated nothing."""
    Path(filename).write_bytes(pickle.dumps({"segments": [], "device_traces": []}))


def _pin(begin: int, size: int, _: int) -> int:
    _OPS.pin(begin, size)
    return 0


def _unpin(begin: int) -> int:
    _OPS.unpin(begin)
    return 0


_TORCH_CUDA: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "StreamContext": OnStream,
    "_initialized": True,
    "_is_in_bad_fork": lambda: False,
    "_dump_snapshot": _dump_snapshot,
    "_lazy_init": lambda: None,
    "_record_memory_history": lambda *_, **__: None,
    "_set_rng_state_offset": None,
    "cudart": lambda: SimpleNamespace(cudaHostRegister=_pin, cudaHostUnregister=_unpin),
    "current_device": lambda: _OPS.device(),
    "current_stream": lambda d=None: _stream_of(torch.accelerator.current_stream(_index(d))),
    "default_stream": lambda d=None: Stream(stream_id=0, device_index=_index(d), device_type=1),
    "device": OnDevice,
    "device_count": lambda: _OPS.gpus(),
    "empty_cache": lambda: _OPS.empty_cache(_OPS.device()),
    "get_arch_list": lambda: ["sm_90"],
    "get_device_capability": lambda d=None: _CAPABILITY,
    "get_device_name": lambda d=None: _NAME,
    "get_device_properties": _properties,
    "get_rng_state": lambda d=None: _OPS.random_state(_index(d)),
    "get_rng_state_all": lambda: [_OPS.random_state(i) for i in range(_OPS.gpus())],
    "init": lambda: None,
    "ipc_collect": lambda: None,
    "is_available": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: False,
    "is_initialized": lambda: True,
    "manual_seed": _seed,
    "manual_seed_all": _seed_all,
    "max_memory_allocated": lambda d=None: _memory(d)[1],
    "max_memory_reserved": lambda d=None: _memory(d)[2],
    "mem_get_info": _free_and_total,
    "memory_allocated": lambda d=None: _memory(d)[0],
    "memory_reserved": lambda d=None: _memory(d)[2],
    "reset_peak_memory_stats": lambda d=None: _OPS.reset_peak(_index(d)),
    "set_device": lambda d: _OPS.set_device(_index(d)),
    "set_rng_state": lambda state, d=None: _OPS.set_random_state(_index(d), state),
    "set_stream": lambda stream: torch.accelerator.set_stream(stream),
    "stream": OnStream,
    "synchronize": _synchronize,
}


# Operators that stand for calls of CUDA's, which are none.
_CALLS = ("device", "set_device", "gpus", "memory", "bytes_per_gpu", "hollow", "on_host", "pin")
_CALLS += ("on_device", "reset_peak", "empty_cache", "resize_storage", "unpin", "seed")
_CALLS += ("random_state", "set_random_state", "synchronize")


def patch() -> None:
    """Replace what would ask for a GPU."""
    # Selective checkpointing would count them.
    SAC_IGNORED_OPS.update(getattr(_OPS, name).default for name in _CALLS)
    for name, value in _TORCH_CUDA.items():
        setattr(torch.cuda, name, value)
        for module in (torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
            if hasattr(module, name):
                setattr(module, name, value)
    if dynamo := sys.modules.get("torch._dynamo.device_interface"):  # keeps what it has found
        for name in vars(dynamo.CudaInterface).keys() & _TORCH_CUDA.keys():
            setattr(dynamo.CudaInterface, name, staticmethod(_TORCH_CUDA[name]))
    if torch.version.cuda:  # it would ask the driver which of these the GPU runs
        for name in ("flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)
        # From PyTorch 2.15 on varlen attention asks for this, and nothing else does from Python.
        torch._C._get_flash_sdp_enabled = lambda: True
    torch.version.cuda = "13.0"
    torch.UntypedStorage.resize_ = _resizing(torch.UntypedStorage.resize_)
    profiler: Any = torch.autograd.profiler.profile
    profiler.__init__ = _without_device(profiler.__init__)


def _resizing(of_host: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.device.type != "cuda":
            return of_host(storage, size)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        _OPS.resize_storage(whole, int(size))
        return storage

    return resize_


def _without_device(init: Callable[..., None]) -> Callable[..., None]:
    """Let the profiler see the host alone: for each operator it would ask CUDA for an event."""
    return lambda *given, **options: init(*given, **options | {"use_device": None})
