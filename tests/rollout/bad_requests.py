"""Requests with one fault each, for services on any engine: what is wrong, the status, and what it must say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from turnwire.tensors import to_tensor
from turnwire.torch_weights import specs_of, weight_tensors
from turnwire.v1 import common_pb2 as common
from turnwire.v1 import rollout_pb2 as pb
from turnwire.weights import chunks

INVALID, ORDER = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION


def named(values: list[tuple[Any, ...]]) -> Iterator[Any]:
    """As parameters whose ids say what is expected."""
    return (pytest.param(*row, id=f"{number}-{row[-1]}") for number, row in enumerate(values))


def tensor(
    dtype: Any = common.DATA_TYPE_INT32, shape: tuple[int, ...] = (2,), data: bytes = b"\5\0\0\0\6\0\0\0"
) -> Any:
    return common.Tensor(dtype=dtype, shape=shape, data=data)


def ids(*values: int) -> common.Tensor:
    return to_tensor(np.array(values, np.int32))


BAD_TENSORS: list[tuple[common.Tensor, str]] = [
    (common.Tensor(), "DATA_TYPE_UNSPECIFIED"),
    (tensor(99), "tensor of 99"),
    (tensor(common.DATA_TYPE_BFLOAT16), "cannot decode"),
    (tensor(common.DATA_TYPE_INT64, (1,)), "expected a tensor of int32"),
    (tensor(common.DATA_TYPE_FLOAT32), "expected a tensor of int32"),
    (tensor(shape=(1, 2)), "one row"),
    (tensor(shape=(), data=b"\5\0\0\0"), "one row"),
    (tensor(shape=(3,)), "cannot have 8 bytes"),
    (tensor(shape=(-2,)), "cannot have 8 bytes"),
    (tensor(shape=(-1, -2)), "cannot have 8 bytes"),
    (tensor(shape=(2**62, 2**62)), "cannot have 8 bytes"),
    (tensor(shape=(0, 2**62), data=b""), "2 dimensions"),
    (tensor(shape=(1,) * 99 + (2,)), "100 dimensions"),
    (tensor(data=b"\5\0\0\0\6\0\0"), "cannot have 7 bytes"),
    (ids(), "tokens"),
    (ids(5, -1), "token ids must be in"),
    (ids(5, 2**31 - 1), "token ids must be in"),
    (ids(*[5] * 1000), "tokens"),
]
"""What is no row of token ids, or one that no model here takes."""

BAD_GENERATIONS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    *(
        ({"sampling": common.SamplingParams(**{name: value})}, name)
        for name, value in (("temperature", math.nan), ("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.5))
    ),
    ({"stop_strings": [""]}, "stop string is empty"),
    ({"stop_strings": ["x"] * 1000}, "there are 1000 stop_strings"),
    ({"stop_strings": ["x" * 5000]}, "stop_strings may have"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"stop_token_ids": [5] * 1000}, "stop_token_ids"),
]
"""Fields of a GenerateRequest."""

BAD_UPDATES: list[tuple[str, grpc.StatusCode, str]] = [
    ("twice the same tensor", INVALID, "come twice"),
    ("an unknown type", INVALID, "no tensor has type 99"),
    ("a negative size", INVALID, "no tensor has"),
    ("an unknown mode", INVALID, "update mode 99"),
    ("a wrong checksum", INVALID, "CRC-32"),
    ("a flipped bit", INVALID, "CRC-32"),
    ("chunks out of order", INVALID, "expected offset 0 "),
    ("chunks that overlap", INVALID, "expected offset"),
    ("a chunk twice", INVALID, "expected offset"),
    ("an empty chunk", INVALID, "empty"),
    ("bytes beyond the end", INVALID, "expected offset"),
    ("a far offset", INVALID, "expected offset"),
    ("bytes missing", INVALID, "bytes came"),
    ("no source", INVALID, "no source"),
    ("a second update", ORDER, "only WeightChunks"),
    ("an empty message", ORDER, "only WeightChunks"),
    ("chunks first", ORDER, "must be a WeightUpdate"),
]
"""Faults of `an_update`."""


def an_update(tensors: Mapping[str, torch.Tensor], fault: str = "") -> list[pb.UpdateWeightsRequest]:
    """The messages of an update to version 1, with one fault."""
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    specs = specs_of(tensors)
    update = pb.WeightUpdate(version=1, stream=pb.StreamSource(), tensors=specs)
    parts = list(chunks([item[3] for item in weight_tensors(tensors)]))
    if fault == "twice the same tensor":
        update.tensors.append(specs[0])
    elif fault == "an unknown type":
        update.tensors[0].dtype = 99  # type: ignore[assignment]
    elif fault == "a negative size":
        update.tensors[0].shape[0] *= -1
    elif fault == "an unknown mode":
        update.mode = 99  # type: ignore[assignment]
    elif fault == "a wrong checksum":
        update.tensors[1].crc32 ^= 1
    elif fault == "a flipped bit":
        parts[1].data = bytes([parts[1].data[0] ^ 1]) + parts[1].data[1:]
    elif fault == "chunks out of order":
        parts[0], parts[1] = parts[1], parts[0]
    elif fault == "chunks that overlap":
        parts[1].offset -= 1
    elif fault == "a chunk twice":
        parts.insert(1, parts[0])
    elif fault == "an empty chunk":
        parts.insert(1, pb.WeightChunk(offset=parts[1].offset))
    elif fault == "bytes beyond the end":
        parts.append(pb.WeightChunk(offset=parts[-1].offset + len(parts[-1].data), data=b"x"))
    elif fault == "a far offset":
        parts.append(pb.WeightChunk(offset=2**64 - 1, data=b"x"))
    elif fault == "bytes missing":
        parts.pop()
    elif fault == "no source":
        update.ClearField("stream")
    requests = [pb.UpdateWeightsRequest(update=update), *(pb.UpdateWeightsRequest(chunk=part) for part in parts)]
    if fault == "a second update":
        requests.insert(2, requests[0])
    elif fault == "an empty message":
        requests.insert(2, pb.UpdateWeightsRequest())
    elif fault == "chunks first":
        del requests[0]
    return requests
