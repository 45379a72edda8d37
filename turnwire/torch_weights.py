"""A torch model's weights for `turnwire.weights`: which tensors they are, their bytes, and safetensors files.

Engine and trainer both take the list of tensors from `policy_tensors`, so that an update brings what is expected.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from turnwire.errors import InvalidRequestError
from turnwire.v1 import common_pb2, rollout_pb2
from turnwire.weights import Buffer, tensor_spec

_DTYPES: dict[torch.dtype, common_pb2.DataType.ValueType] = {
    torch.float32: common_pb2.DATA_TYPE_FLOAT32,
    torch.bfloat16: common_pb2.DATA_TYPE_BFLOAT16,
    torch.float16: common_pb2.DATA_TYPE_FLOAT16,
    torch.int32: common_pb2.DATA_TYPE_INT32,
    torch.int64: common_pb2.DATA_TYPE_INT64,
    torch.uint8: common_pb2.DATA_TYPE_UINT8,
    torch.float64: common_pb2.DATA_TYPE_FLOAT64,
    torch.bool: common_pb2.DATA_TYPE_BOOL,
}


def policy_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that make a policy, by name: parameters (a tied one once, under its first name) and saved buffers."""
    tensors: dict[str, torch.Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    saved = model.state_dict(keep_vars=True)
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in saved})
    return tensors


def wire_dtype(dtype: torch.dtype) -> common_pb2.DataType.ValueType:
    """The wire's type. Raises InvalidRequestError for one that it does not have."""
    if dtype not in _DTYPES:
        raise InvalidRequestError(f"tensors of {dtype} cannot be sent")
    return _DTYPES[dtype]


def tensor_buffer(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, row-major; shared with it where it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def weight_tensors(
    tensors: Mapping[str, torch.Tensor],
) -> list[tuple[str, common_pb2.DataType.ValueType, Sequence[int], Buffer]]:
    """What `turnwire.client.RolloutClient.update_weights` takes."""
    return [(name, wire_dtype(item.dtype), tuple(item.shape), tensor_buffer(item)) for name, item in tensors.items()]


def specs_of(tensors: Mapping[str, torch.Tensor]) -> list[rollout_pb2.TensorSpec]:
    """Name, type, shape and CRC-32 of each."""
    return [tensor_spec(*item) for item in weight_tensors(tensors)]


def write_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file so that no reader sees half of it."""
    contents: dict[str, Any] = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(descriptor)
    try:
        save_file(contents, scratch, metadata=dict(metadata) if metadata else None)
        os.replace(scratch, path)
    except BaseException:  # nothing half-written may stay behind, whatever stopped us
        os.unlink(scratch)
        raise
