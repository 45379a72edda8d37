"""Weights on the wire: specs with a CRC-32 a tensor, one checksum over all of them, and chunks of bounded size.

Both sides of UpdateWeights use these, so that they agree byte for byte. A tensor's bytes are row-major and
little-endian; nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from isal import isal_zlib

from turnwire.errors import InvalidRequestError
from turnwire.v1 import common_pb2, rollout_pb2

CHUNK_BYTES = 1024 * 1024
"""Most bytes of one WeightChunk."""

Buffer = bytes | bytearray | memoryview

_ITEM_BYTES = {
    common_pb2.DATA_TYPE_FLOAT32: 4,
    common_pb2.DATA_TYPE_BFLOAT16: 2,
    common_pb2.DATA_TYPE_FLOAT16: 2,
    common_pb2.DATA_TYPE_INT32: 4,
    common_pb2.DATA_TYPE_INT64: 8,
    common_pb2.DATA_TYPE_UINT8: 1,
    common_pb2.DATA_TYPE_FLOAT64: 8,
    common_pb2.DATA_TYPE_BOOL: 1,
}


def tensor_bytes(dtype: common_pb2.DataType.ValueType, shape: Sequence[int]) -> int:
    """Bytes of a tensor. Raises InvalidRequestError for an unknown type or a negative size."""
    if dtype not in _ITEM_BYTES or any(size < 0 for size in shape):
        raise InvalidRequestError(f"no tensor has type {dtype} and shape {tuple(shape)}")
    return _ITEM_BYTES[dtype] * math.prod(shape)


def tensor_spec(
    name: str, dtype: common_pb2.DataType.ValueType, shape: Sequence[int], data: Buffer
) -> rollout_pb2.TensorSpec:
    """Describe a tensor by its bytes. Raises InvalidRequestError if they do not fit the shape."""
    size = memoryview(data).nbytes
    if size != tensor_bytes(dtype, shape):
        raise InvalidRequestError(f"{name}: {size} bytes do not make a tensor of shape {tuple(shape)}")
    return rollout_pb2.TensorSpec(name=name, dtype=dtype, shape=shape, crc32=isal_zlib.crc32(data))


def checksum(specs: Iterable[rollout_pb2.TensorSpec]) -> str:
    """Of all tensors together: hex SHA-256 over the lines `name dtype shape crc32`, sorted by name.

    `dtype` is the enum's name, `shape` is written `2,3`, the CRC as eight hex digits.
    """
    lines = (
        f"{spec.name} {common_pb2.DataType.Name(spec.dtype)} {','.join(map(str, spec.shape))} {spec.crc32:08x}\n"
        for spec in sorted(specs, key=lambda spec: spec.name)
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def chunks(buffers: Iterable[Buffer], size: int = CHUNK_BYTES, first: int = 0) -> Iterator[rollout_pb2.WeightChunk]:
    """The tensors' bytes one after the other, from byte `first` on, in chunks of at most `size` bytes; no chunk spans
    two tensors."""
    offset = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for start in range(min(max(first - offset, 0), view.nbytes), view.nbytes, size):
            data = bytes(view[start : start + size])
            yield rollout_pb2.WeightChunk(offset=offset + start, data=data)
        offset += view.nbytes


class WeightsError(InvalidRequestError):
    """New weights do not fit the policy. The old ones stay."""


class MissingTensorError(WeightsError):
    """A tensor of the policy is not among the new weights."""


class ExtraTensorError(WeightsError):
    """The new weights hold a tensor that the policy does not have, or hold one twice."""


class ShapeMismatchError(WeightsError):
    """A tensor has another shape than the policy's."""


class DtypeMismatchError(WeightsError):
    """A tensor is of another type than the policy's."""


class CorruptTensorError(WeightsError):
    """A tensor's bytes are not those that its checksum was made of, or not all of them came."""


def check_specs(policy: Sequence[rollout_pb2.TensorSpec], given: Sequence[rollout_pb2.TensorSpec]) -> None:
    """Whether `given` brings exactly the policy's tensors. Raises the WeightsError that says what is wrong first."""
    names = [spec.name for spec in given]
    wanted = {spec.name: spec for spec in policy}
    if missing := sorted(wanted.keys() - set(names)):
        raise MissingTensorError(f"{len(missing)} tensors are missing: {_some(missing)}")
    if extra := sorted(set(names) - wanted.keys()):
        raise ExtraTensorError(
            f"{len(extra)} tensors are not the policy's: {_some(extra)}; "
            "a tied weight is sent once, under its first name"
        )
    if len(names) != len(wanted):
        raise ExtraTensorError(f"these tensors come twice: {_some([n for n, k in Counter(names).items() if k > 1])}")
    for spec in given:
        tensor_bytes(spec.dtype, spec.shape)
        own = wanted[spec.name]
        if list(spec.shape) != list(own.shape):
            raise ShapeMismatchError(f"{spec.name} has shape {list(spec.shape)}, the policy's has {list(own.shape)}")
        if spec.dtype != own.dtype:
            kinds = (common_pb2.DataType.Name(item.dtype) for item in (spec, own))
            raise DtypeMismatchError("{} is {}, the policy's is {}".format(spec.name, *kinds))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
