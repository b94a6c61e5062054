"""How a stream over the step socket ended, as gRPC would say it."""

from __future__ import annotations

import grpc

from drafter_service.stubs import drafter_pb2 as pb

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


def read_end(data: bytes) -> StreamError | None:
    """What the last frame of a stream says; None: it ended in good order. Raises DecodeError."""
    error = pb.Error.FromString(data)
    code = STATUS.get(error.code, grpc.StatusCode.UNKNOWN)
    return None if code is grpc.StatusCode.OK else StreamError(code, error.message)


def broken(why: object = None) -> StreamError:
    """The connection ended before the stream did."""
    return StreamError(grpc.StatusCode.UNAVAILABLE, "the connection broke" + (f": {why}" if why else ""))
