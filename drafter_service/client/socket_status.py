"""How a stream over the step socket ended, as gRPC would say it."""

from __future__ import annotations

from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import WireError

Parsed = TypeVar("Parsed", bound=Message)

STATUS = {code.value[0]: code for code in grpc.StatusCode}


class StreamError(grpc.RpcError):  # type: ignore[misc]
    """A stream did not end in good order."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        """Why."""
        return self._code

    def details(self) -> str:
        """Why, in words."""
        return self._details


def read_response(data: bytes) -> pb.DraftResponse:
    """What a frame holds. Raises WireError for anything else than a response."""
    return _parsed(pb.DraftResponse, data)


def read_end(data: bytes) -> StreamError | None:
    """What the last frame of a stream says; None: it ended in good order. Raises WireError."""
    error = _parsed(pb.Error, data)
    code = STATUS.get(error.code, grpc.StatusCode.UNKNOWN)
    return None if code is grpc.StatusCode.OK else StreamError(code, error.message)


def broken(why: object = None) -> StreamError:
    """The connection ended before the stream did."""
    return StreamError(grpc.StatusCode.UNAVAILABLE, "the connection broke" + (f": {why}" if why else ""))


def _parsed(kind: type[Parsed], data: bytes) -> Parsed:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise WireError(f"a frame that holds no {kind.__name__}") from None
