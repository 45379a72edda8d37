"""New weights on their way into an engine, whatever way they came: one safetensors file, complete and verified.

A client's file is taken as it is; what comes in a stream fills a file in memory (memfd), which has no name that could
be left behind and no limit but the machine's memory. Both are read through a descriptor that this process holds: they
stay until it is closed, whatever becomes of a name, and vLLM's workers read them under `StagedWeights.path`.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from isal import isal_zlib
from safetensors import SafetensorError, safe_open

from turnwire.errors import InfraError, InvalidRequestError, WrongOrderError
from turnwire.torch_weights import specs_of
from turnwire.v1 import common_pb2, rollout_pb2
from turnwire.weights import CorruptTensorError, WeightsError, checksum, tensor_bytes

_SAFETENSORS = {
    common_pb2.DATA_TYPE_FLOAT32: "F32",
    common_pb2.DATA_TYPE_BFLOAT16: "BF16",
    common_pb2.DATA_TYPE_FLOAT16: "F16",
    common_pb2.DATA_TYPE_INT32: "I32",
    common_pb2.DATA_TYPE_INT64: "I64",
    common_pb2.DATA_TYPE_UINT8: "U8",
    common_pb2.DATA_TYPE_FLOAT64: "F64",
    common_pb2.DATA_TYPE_BOOL: "BOOL",
}


class StagedWeights:
    """The tensors of an update in a safetensors file that is held open until `close`."""

    def __init__(self, descriptor: int, specs: Sequence[rollout_pb2.TensorSpec]) -> None:
        """Takes over the descriptor. `specs`: what the file holds, verified."""
        self._descriptor: int | None = descriptor
        self.specs = list(specs)

    @property
    def path(self) -> Path:
        """For this process and others of its user on this machine, while it is open."""
        return Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The file's tensors, mapped into memory; they outlive `close`."""
        return _mapped(self.path)

    def share(self) -> StagedWeights:
        """The same, to be closed on its own."""
        assert self._descriptor is not None  # noqa: S101 - it is open
        return StagedWeights(os.dup(self._descriptor), self.specs)

    def verify(self) -> None:
        """Raises InfraError where the file no longer holds what it held: it is the client's, who may have written to
        it."""
        if checksum(specs_of(self.tensors())) != checksum(self.specs):
            raise InfraError("the file with the current weights was changed after they had been put in place")

    def close(self) -> None:
        """Give the file back. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def staged_file(path: Path) -> StagedWeights:
    """A client's file. Reads all of it, for its checksums. Raises InvalidRequestError where it cannot be read."""
    staged = None
    try:
        staged = StagedWeights(_open(path), ())
        staged.specs = specs_of(staged.tensors())
    except (OSError, ValueError, SafetensorError) as error:  # a ValueError: a path with a NUL in it
        if staged is not None:
            staged.close()
        raise InvalidRequestError(f"{path} cannot be read as a safetensors file: {error}") from error
    return staged


def _open(path: Path) -> int:
    """A descriptor of an ordinary file; a pipe would be waited for, each time."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is no ordinary file")
    return descriptor


class IncomingWeights:
    """Takes in the bytes of an update, whose specs have passed `turnwire.weights.check_specs`, tensor by tensor. A
    tensor whose CRC-32 does not hold is refused with its last byte."""

    def __init__(self, specs: Sequence[rollout_pb2.TensorSpec]) -> None:
        """Raises CorruptTensorError for an empty tensor with another CRC-32 than that of nothing."""
        self._specs = list(specs)
        header, self._size = _header(self._specs)
        self._start = len(header)
        self._descriptor = os.memfd_create("turnwire-weights", os.MFD_CLOEXEC)
        os.truncate(self._descriptor, self._start + self._size)
        self._bytes = mmap.mmap(self._descriptor, self._start + self._size)
        self._bytes[: self._start] = header
        self.received = 0
        """Bytes, in the order of the specs."""
        self._tensor, self._left, self._crc = -1, 0, 0
        self._next_tensors()

    def add(self, chunk: rollout_pb2.WeightChunk) -> None:
        """Take the next chunk. Raises WeightsError if it does not follow the last one or goes beyond the end, and
        CorruptTensorError if it ends a tensor that is not what it should be."""
        end = chunk.offset + len(chunk.data)
        if not chunk.data:
            raise WeightsError("a chunk is empty")
        if chunk.offset != self.received or end > self._size:
            raise WeightsError(
                f"a chunk of {len(chunk.data)} bytes is for offset {chunk.offset}; expected offset {self.received} of "
                f"{self._size} bytes"
            )
        self._bytes[self._start + self.received : self._start + end] = chunk.data
        rest = memoryview(chunk.data)
        while rest:
            part, rest = rest[: self._left], rest[self._left :]
            self._crc = isal_zlib.crc32(part, self._crc)
            self._left -= len(part)
            self.received += len(part)
            if not self._left:
                self._end_tensor()

    def _end_tensor(self) -> None:
        spec = self._specs[self._tensor]
        if self._crc != spec.crc32:
            raise CorruptTensorError(f"{spec.name}: CRC-32 is {self._crc:08x}, expected {spec.crc32:08x}")
        self._next_tensors()

    def _next_tensors(self) -> None:
        """Go to the next tensor that has bytes."""
        self._tensor, self._crc = self._tensor + 1, 0
        if self._tensor < len(self._specs):
            spec = self._specs[self._tensor]
            self._left = tensor_bytes(spec.dtype, spec.shape)
            if not self._left:
                self._end_tensor()

    def finish(self) -> StagedWeights:
        """All of it. Raises CorruptTensorError where bytes are missing."""
        if self.received != self._size:
            raise CorruptTensorError(f"{self.received} of {self._size} bytes came")
        staged = StagedWeights(os.dup(self._descriptor), self._specs)
        self.close()
        return staged

    def close(self) -> None:
        """Give the memory back."""
        self._bytes.close()
        os.close(self._descriptor)


class Inbox:
    """The streamed update that is coming in. When its stream breaks, what has come is kept for a while, so that the
    client need not send it again."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long it is kept."""
        self._seconds = seconds
        self._incoming: IncomingWeights | None = None
        self._version, self._checksum = 0, ""
        self._forgetting: asyncio.TimerHandle | None = None

    def partial(self) -> rollout_pb2.PartialUpdate | None:
        """What there is of an update that has not come whole."""
        if self._incoming is None:
            return None
        return rollout_pb2.PartialUpdate(
            version=self._version, checksum=self._checksum, received_bytes=self._incoming.received
        )

    def open(self, version: int, specs: Sequence[rollout_pb2.TensorSpec], offset: int) -> IncomingWeights:
        """Begin an update, or go on with it at `offset`. Raises WrongOrderError where that is not what there is."""
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None
        total = checksum(specs)
        known = self._incoming if (self._version, self._checksum) == (version, total) else None
        if offset and (known is None or known.received != offset):
            here = "nothing" if known is None else f"{known.received} bytes"
            self.keep()
            raise WrongOrderError(f"the stream begins at offset {offset}, but {here} of this update is here")
        if offset and known is not None:
            return known
        self.drop()
        self._incoming = IncomingWeights(specs)
        self._version, self._checksum = version, total
        return self._incoming

    def keep(self) -> None:
        """The stream broke: wait for the client to come again."""
        if self._incoming is not None:
            self._forgetting = asyncio.get_running_loop().call_later(self._seconds, self.drop)

    def finish(self) -> StagedWeights:
        """The stream has ended: all that came. Raises CorruptTensorError where bytes are missing: so it ends, too, when
        a client is cut off."""
        assert self._incoming is not None  # noqa: S101 - `open` came before
        try:
            staged = self._incoming.finish()
        except CorruptTensorError:
            self.keep()
            raise
        self._incoming = None
        return staged

    def drop(self) -> None:
        """Forget what came."""
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None


def _mapped(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict


def _header(specs: Sequence[rollout_pb2.TensorSpec]) -> tuple[bytes, int]:
    """What a safetensors file of these tensors begins with, and the bytes that follow it.

    https://huggingface.co/docs/safetensors: the JSON's length (8 bytes), then the JSON, filled up with spaces so that
    the tensors are aligned.
    """
    entries, end = {}, 0
    for spec in specs:
        start, end = end, end + tensor_bytes(spec.dtype, spec.shape)
        entries[spec.name] = {
            "dtype": _SAFETENSORS[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end
