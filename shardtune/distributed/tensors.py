"""Dtypes by name, and the part of a sharded tensor that this rank holds."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# https://github.com/huggingface/safetensors#format
SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


DTYPES = {dtype_name(dtype): dtype for dtype in SAFETENSORS_NAMES}
DTYPES_IN_SAFETENSORS = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copy_slice(whole: torch.Tensor, sharded: torch.Tensor) -> None:
    """Copy a whole tensor into another tensor, or this rank's part of it into a DTensor."""
    to_local(sharded).copy_(slice_like(whole, sharded))


def slice_like(whole: torch.Tensor, sharded: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `whole`, cut as `sharded` is; all of it if that is no DTensor."""
    if not isinstance(sharded, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(
        sharded.shape, sharded.device_mesh, sharded.placements
    )
    ends = (start + size for start, size in zip(offset, shape, strict=True))
    return whole[tuple(map(slice, offset, ends))]


def sharded_as(
    sharded: torch.Tensor, local: torch.Tensor, whole: torch.Size | None = None
) -> torch.Tensor:
    """Return a DTensor that is sharded as another one, from this rank's part on any device.

    `whole`: the shape of all parts together, if not that of the other one. `DTensor.from_local`
    moves a part to the mesh's device.
    """
    if not isinstance(sharded, DTensor):
        return local
    shape, stride = sharded.shape, sharded.stride()
    if whole is not None:
        shape, stride = whole, torch.empty(whole, device="meta").stride()
    meta = TensorMeta(shape, stride, local.dtype)
    spec = DTensorSpec(sharded.device_mesh, sharded.placements, tensor_meta=meta)
    return cast(Any, DTensor)(local, spec, requires_grad=False)


def first_indices(tensor: torch.Tensor) -> Sequence[int]:
    """Return the first index, in each dimension of the whole tensor, of this rank's part."""
    if isinstance(tensor, DTensor):
        return cast(Any, tensor).__create_chunk_list__()[0].offsets
    return [0] * tensor.dim()


def is_spread(parameter: torch.Tensor) -> bool:
    """Return whether a parameter, sharded or gathered, is a stack of spread experts."""
    return "expert" in _dimensions(parameter)


def is_cut(parameter: torch.Tensor) -> bool:
    """Return whether the ranks of `tensor` compute with parts of a parameter."""
    return "tensor" in _dimensions(parameter)


def gathered_numel(parameter: torch.Tensor) -> int:
    """Return how many elements of a sharded parameter a rank has once FSDP2 has gathered it."""
    names, numel = _dimensions(parameter), parameter.numel()
    for name in {"expert", "tensor"}.intersection(names):
        numel //= cast(DTensor, parameter).device_mesh.size(names.index(name))
    return numel


def _dimensions(parameter: torch.Tensor) -> tuple[str, ...]:
    is_sharded = isinstance(parameter, DTensor)
    return (cast(DTensor, parameter).device_mesh.mesh_dim_names or ()) if is_sharded else ()
