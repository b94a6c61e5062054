"""A gRPC server that answers with reports, or refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs import drafter_pb2_grpc


class Reporter(drafter_pb2_grpc.DrafterServiceServicer):
    """Answers each request with the next of `documents`, the last one again and again; notes the requests."""

    def __init__(self, *documents, refusal=None):
        self._documents, self._refusal = list(documents), refusal
        self.requests, self.metadata = [], []

    def Report(self, request, context):  # noqa: N802
        self.requests.append(request)
        self.metadata = [(entry.key, entry.value) for entry in context.invocation_metadata()]
        if self._refusal is not None:
            context.abort(*self._refusal)
        document = self._documents.pop(0) if len(self._documents) > 1 else self._documents[0]
        return pb.ReportResponse(json=document)


@contextmanager
def reporting(address, reporter):
    """While it lasts, `reporter` answers at `address`."""
    server = grpc.server(ThreadPoolExecutor(2))
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(reporter, server)
    server.add_insecure_port(address)
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()
