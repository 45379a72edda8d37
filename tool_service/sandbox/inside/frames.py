"""Frames on the stream socket between the service and a supervisor.

A frame is two big-endian u32 lengths, a JSON header and raw bytes: `header_length blob_length header blob`. Program
output travels in the blob, so that it is never escaped, decoded or searched. Both ends are ours; the caps are there so
that a bug ends in an error and not in memory.
"""

import json
import struct
from typing import Any

LENGTHS = struct.Struct(">II")
MAX_HEADER = 20 * 1024 * 1024
"""Bytes. A turn's payload (code, SQL script) travels in the header."""
MAX_BLOB = 1024 * 1024 * 1024
"""Bytes. Files travel in the blob, bounded by SandboxLimits.file_bytes before they get here."""


_to_json = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
_from_json = json.JSONDecoder().raw_decode


class FrameError(Exception):
    """The stream does not hold a frame: the peer is broken or is not ours."""


def encode(header: dict[str, Any], blob: bytes = b"") -> bytes:
    """One frame. ASCII JSON, so that a lone surrogate in a payload survives the trip."""
    head = _to_json(header).encode("ascii")
    if len(head) > MAX_HEADER or len(blob) > MAX_BLOB:
        raise FrameError(f"a frame of {len(head)} + {len(blob)} bytes is over the cap")
    return LENGTHS.pack(len(head), len(blob)) + head + blob


def header(head: bytes) -> Any:
    """Of a frame, decoded. Raises ValueError. `json.loads` would first guess the encoding, and look for space."""
    return _from_json(head.decode("ascii"))[0]


class Decoder:
    """Cuts a byte stream into frames. `feed` what arrived, then call `next` until it gives None."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> tuple[bytes, bytes] | None:
        """The next frame as (header JSON, blob), or None when it has not wholly arrived."""
        if len(self._buffer) < LENGTHS.size:
            return None
        head_length, blob_length = LENGTHS.unpack_from(self._buffer)
        if head_length > MAX_HEADER or blob_length > MAX_BLOB:
            raise FrameError(f"a frame claims {head_length} + {blob_length} bytes")
        start = LENGTHS.size
        end = start + head_length + blob_length
        if len(self._buffer) < end:
            return None
        head = bytes(self._buffer[start : start + head_length])
        blob = bytes(self._buffer[start + head_length : end])
        del self._buffer[:end]
        return head, blob
