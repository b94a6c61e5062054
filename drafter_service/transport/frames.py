"""Frames: the Draft stream over a plain Unix socket, several times faster than HTTP/2.

    client    MAGIC, then frames: the "authorization" metadata of the call ("" for none), then every DraftRequest
    service   frames: every DraftResponse, then one that is marked as the last and holds an Error; its code is a gRPC
              status code, 0 for a stream that ended normally

A frame is a length in bytes, uint32 little endian, and the data. The highest bit of the length marks the last frame.
"""

from __future__ import annotations

import struct

from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import MAX_MESSAGE_BYTES, WireError

MAGIC = b"ssd.drafter.v1\n"
HEADER = struct.Struct("<I")
LAST = 1 << 31


def framed(data: bytes) -> bytes:
    """Return a message as a frame."""
    return HEADER.pack(len(data)) + data


def last_frame(code: int, message: str) -> bytes:
    """Return the frame that ends a stream; `code` is a gRPC status code."""
    data = pb.Error(code=code, message=message).SerializeToString()
    return HEADER.pack(len(data) | LAST) + data


def read_header(header: bytes | bytearray, begin: int = 0) -> tuple[int, bool]:
    """Return a frame's number of bytes, and whether it is the last. Raises WireError for a frame that is too long."""
    (length,) = HEADER.unpack_from(header, begin)
    size = length & ~LAST
    if size > MAX_MESSAGE_BYTES:
        raise WireError(f"a frame has {size} bytes; the maximum is {MAX_MESSAGE_BYTES}")
    return size, length >= LAST


class Frames:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bool]]:
        """Add received bytes; return completed frames, each with whether it is the last. Raises as `read_header`."""
        if not self._data and len(data) >= HEADER.size:
            size, is_last = read_header(data)
            if size == len(data) - HEADER.size:
                return [(data[HEADER.size :], is_last)]
        self._data += data
        frames, begin = [], 0
        while len(self._data) >= begin + HEADER.size:
            size, is_last = read_header(self._data, begin)
            end = begin + HEADER.size + size
            if len(self._data) < end:
                break
            frames.append((bytes(self._data[begin + HEADER.size : end]), is_last))
            begin = end
        del self._data[:begin]
        return frames
