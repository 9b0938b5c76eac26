"""The kernels that Inductor writes for a GPU and Triton compiles for it, made without one.

On a pretended GPU whose large tensors have no contents: Inductor's code calls its kernels, and each
is compiled for sm_90 and not run. Needs Triton, whose wheel has NVIDIA's assembler.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from . import install

_TARGET = "cuda", 90, 32  # Hopper, and threads of a warp
_H100 = {
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "L2_cache_size": 52428800,
    "gcnArchName": "",
    "uuid": "none",
}


# Workers would look for a GPU, and a cache may hide a kernel.
_IN_PROCESS = {"compile_threads": 1, "force_disable_caches": True}


class TritonKernel(NamedTuple):
    """A kernel of Inductor's. It times its configurations where there are several, and takes one.

    `spilled`: bytes of local memory and stack that a thread of the worst one has; None where
    nothing says it.
    """

    name: str
    source: str
    reduces: bool
    types: str  # of its arguments
    configurations: int
    spilled: int | None


def compile_for_gpus() -> dict[str, TritonKernel]:
    """Give this process a GPU for which everything is compiled, and nothing of that runs.

    Return what fills with the kernels, each as it is called first.
    """
    install(gpus=1, hollow=True)
    # Only now: these ask for GPUs when they are imported.
    import torch._dynamo.device_interface as interfaces
    import torch._inductor.config as inductor_config
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    known = vars(torch.cuda.get_device_properties())
    properties = SimpleNamespace(**_H100 | known)

    def nothing() -> Any:  # a function of its own: Dynamo tells these from one another
        return lambda *_, **__: 0

    class Worker:
        get_device_properties = staticmethod(lambda *_: properties)
        set_device = current_device = staticmethod(nothing())

    answers: dict[Any, dict[str, Any]] = {
        interfaces.CudaInterface: {
            "Worker": Worker,
            "get_device_properties": staticmethod(lambda *_: properties),
            "get_compute_capability": staticmethod(lambda *_: _TARGET[1]),
            "get_raw_stream": staticmethod(nothing()),
            "is_available": staticmethod(lambda: True),
            "is_triton_capable": staticmethod(lambda *_: True),
        },
        torch.cuda: {
            "get_device_properties": lambda *_: properties,
            "_exchange_device": nothing(),
            "_maybe_exchange_device": nothing(),
        },
        torch._C: {
            "_cuda_getCurrentRawStream": nothing(),
            "_cuda_exchangeDevice": nothing(),
            "_cuda_maybeExchangeDevice": nothing(),
        },
        torch._C._dynamo.guards: {"_empty_strided_cuda": _empty_strided},
        triton_helpers: {"set_driver_to_gpu": nothing},
        inductor_config: {"use_static_cuda_launcher": False, **_IN_PROCESS},
        driver: {
            "_active": SimpleNamespace(
                get_current_target=lambda: GPUTarget(*_TARGET),
                get_current_device=nothing(),
                get_current_stream=nothing(),
                get_device_interface=lambda: torch.cuda,
                get_active_torch_device=lambda: torch.device("cuda", 0),
            )
        },
    }
    for owner, values in answers.items():
        for name, value in values.items():
            setattr(owner, name, value)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else the project sets it
    return _take_kernels(triton_heuristics.CachingAutotuner)


def _take_kernels(tuners: Any) -> dict[str, TritonKernel]:
    """Let Inductor's tuners hand in their kernels, in place of loading and running them."""
    kernels: dict[str, TritonKernel] = {}

    def take(tuner: Any) -> None:
        name, results = tuner.inductor_meta["kernel_name"], tuner.compile_results
        spilled = [_spilled(result.kernel.asm["cubin"]) for result in results]
        kernels[f"{name}-{tuner.kernel_hash}"] = TritonKernel(
            name,
            tuner.fn.src,
            reduces=name.startswith(("triton_red", "triton_per")),
            types=" ".join(tuner.triton_meta["signature"].values()),
            configurations=len(results),
            spilled=None if None in spilled else max(spilled),
        )
        tuner.launchers = [lambda *_, **__: None] * len(results)

    tuners._make_launchers = take
    tuners.run = lambda *_, **__: None
    return kernels


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _spilled(cubin: bytes) -> int | None:
    """Return the bytes of stack and local memory of a thread, as NVIDIA's tool says."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.is_file():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+) .*?LOCAL:(\d+)", said)
    assert found, said
    return int(found[1]) + int(found[2])
