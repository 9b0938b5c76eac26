"""GPUs made of host memory, for PyTorch without a GPU: builds for CPUs and for CUDA.

After `install(gpus=2)` tensors on `cuda:0` and `cuda:1` are real tensors of that device, and each
operator without a kernel here runs on the CPU over the same memory. NCCL is gloo. FlashAttention
and the grouped product are their definitions, with the checks of the real kernels.

- Fresh and freed memory is NaN, or -1 in integers, so that what reads it shows.
- What a GPU would refuse is refused: tensors of two devices in an operator, memory beyond the
  GPU's, what the real kernels do not take.
- A copy between a GPU and pinned memory that does not block is made as late as a GPU may make it:
  it lands when its stream, or one that waits for its event, goes on; for the host, when that waits.
- Work with memory that another stream has written last is refused, unless its own stream or the
  host has waited for that.
- `host_waits()` has each place at which the host would wait for the GPU.
- `memory()` has the bytes that are held, and the most so far, of each stream too.
- With `hollow=True` a tensor of more than 2**20 elements has no contents, and operators on it only
  make shapes. A model of any size then takes steps on one core, and its memory is counted. See
  `hollow.py`.

What it cannot show: kernels that write what another stream still reads, NCCL itself, the rounding
and the speed of kernels, fragmentation, compiled code, drivers.

Any command, with N GPUs in all of its processes (needs g++; the first time takes half a minute):

    python -m tests.pretend_gpu --gpus 2 torchrun --nproc_per_node=2 train_fsdp.py --config FILE
    python -m tests.pretend_gpu --gpus 2 env NNODES=1 ./launch_node0.sh --config FILE
    python -m tests.pretend_gpu --gpus 1 --gb 80 python -m some.module
"""

import ctypes

import torch

from .build import build, lacks_compiler

__all__ = ["DEFAULT_GB", "build", "install", "lacks_compiler"]

DEFAULT_GB = 80.0


def install(gpus: int, gb: float = DEFAULT_GB, hollow: bool = False) -> None:
    """Give this process so many GPUs of `gb` x 1e9 bytes each, before anything asks for one.

    Forked processes have them too. A second call changes the numbers.

    Raises:
        RuntimeError: the C++ compiler is missing, or it cannot build the device.
    """
    library = build()
    if str(library) not in torch.ops.loaded_libraries:
        torch.ops.load_library(str(library))
        # Only now: these register kernels of the device.
        from . import cuda_api, nccl, stub_kernels, waits

        waits.listen(ctypes.CDLL(str(library)))
        cuda_api.patch()
        stub_kernels.register()
        nccl.patch()
    torch.ops.pretend.configure(gpus, gb * 1e9, hollow)
