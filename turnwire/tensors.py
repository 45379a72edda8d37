"""numpy arrays to and from `turnwire.v1.Tensor`: row-major, little-endian bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from turnwire.errors import InvalidRequestError
from turnwire.v1 import common_pb2 as pb

_DTYPES: dict[pb.DataType.ValueType, str] = {
    pb.DATA_TYPE_FLOAT32: "<f4",
    pb.DATA_TYPE_FLOAT16: "<f2",
    pb.DATA_TYPE_FLOAT64: "<f8",
    pb.DATA_TYPE_INT32: "<i4",
    pb.DATA_TYPE_INT64: "<i8",
    pb.DATA_TYPE_UINT8: "|u1",
    pb.DATA_TYPE_BOOL: "|b1",
}
_BY_NUMPY = {np.dtype(name): dtype for dtype, name in _DTYPES.items()}


def to_tensor(array: npt.NDArray[Any]) -> pb.Tensor:
    """Encode an array of any shape. Raises InvalidRequestError for a dtype the wire does not have."""
    little = array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype
    dtype = _BY_NUMPY.get(little)
    if dtype is None:
        raise InvalidRequestError(f"arrays of {array.dtype} cannot be sent; use one of {sorted(map(str, _BY_NUMPY))}")
    return pb.Tensor(dtype=dtype, shape=array.shape, data=np.ascontiguousarray(array, little).tobytes())


def from_tensor(tensor: pb.Tensor, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """Decode to a read-only array that shares the message's bytes.

    Raises InvalidRequestError if the bytes do not fit the shape, or the array is not of `dtype` where one is given.
    """
    name = _DTYPES.get(tensor.dtype)
    if name is None:
        known = tensor.dtype in pb.DataType.values()
        raise InvalidRequestError(
            f"cannot decode a tensor of {pb.DataType.Name(tensor.dtype) if known else tensor.dtype}"
        )
    wanted = np.dtype(name)
    if dtype is not None and wanted != np.dtype(dtype):
        raise InvalidRequestError(f"expected a tensor of {np.dtype(dtype)}, got {wanted}")
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape) or len(tensor.data) != math.prod(shape) * wanted.itemsize:
        raise InvalidRequestError(f"a {wanted} tensor of shape {shape} cannot have {len(tensor.data)} bytes")
    try:
        return np.frombuffer(tensor.data, dtype=wanted).reshape(shape)
    except ValueError as error:  # more dimensions, or empty ones larger, than numpy has
        raise InvalidRequestError(f"a tensor of {len(shape)} dimensions cannot be used: {error}") from error
