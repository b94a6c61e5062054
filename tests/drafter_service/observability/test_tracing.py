"""Traces of gRPC calls."""

import asyncio
import builtins
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import pytest

from drafter_service.observability.tracing import interceptors
from ssd.errors import UserError

pytest.importorskip("opentelemetry.instrumentation.grpc", reason="the extra otel is not installed")

ONE_CALL = """
import asyncio, grpc
from drafter_service.observability.tracing import interceptors

async def fail(request, context):
    raise ValueError("Dear Mr Holmes")

async def main():
    server = grpc.aio.server(interceptors=interceptors(True))
    handler = grpc.unary_unary_rpc_method_handler(fail)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("ssd.Test", {"Call": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            await channel.unary_unary("/ssd.Test/Call")(b"")
        except grpc.aio.AioRpcError:
            pass
    await server.stop(None)

asyncio.run(main())
"""


@pytest.fixture
def spans(monkeypatch):
    """Return a function that returns the finished spans."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # A process can set its provider only once, so tests replace it.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter.get_finished_spans


async def call(chosen):
    """Make one unary call and one stream of three messages to a server with these interceptors."""

    async def unary(request, _context):
        return request

    async def stream(requests, _context):
        async for request in requests:
            yield request

    server = grpc.aio.server(interceptors=chosen)
    handlers = {
        "Call": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("ssd.Test", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await channel.unary_unary("/ssd.Test/Call")(b"a") == b"a"
        answers = channel.stream_stream("/ssd.Test/Stream")(iter([b"a", b"b", b"c"]))
        assert [answer async for answer in answers] == [b"a", b"b", b"c"]
    await server.stop(None)


def test_calls_and_streams_are_spans(spans):
    asyncio.run(call(interceptors(True)))
    assert sorted(span.name for span in spans()) == ["/ssd.Test/Call", "/ssd.Test/Stream"]
    for span in spans():
        assert span.kind.name == "SERVER"
        assert span.attributes["rpc.service"] == "ssd.Test"
        assert span.attributes["rpc.grpc.status_code"] == 0


def test_tracing_is_off_by_default(spans):
    assert interceptors(False) == []
    asyncio.run(call(interceptors(False)))
    assert not spans()


def test_missing_extra_is_named(monkeypatch):
    real_import = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert interceptors(False) == []
    with pytest.raises(UserError, match=r"reports.tracing needs .* pip install 'ssd-drafter\[otel\]'"):
        interceptors(True)


def test_spans_are_exported_without_exception_messages():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the OTLP exporter is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    done = subprocess.run(
        [sys.executable, "-c", ONE_CALL],
        env={"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    collector.shutdown()
    collector.server_close()
    assert done.returncode == 0, done.stderr
    ((path, body),) = received
    assert path == "/v1/traces"
    (resource_spans,) = ExportTraceServiceRequest.FromString(body).resource_spans
    attributes = {each.key: each.value.string_value for each in resource_spans.resource.attributes}
    assert attributes["service.name"] == "ssd-drafter"
    assert attributes["deployment.environment"] == "test"
    (span,) = resource_spans.scope_spans[0].spans
    assert span.name == "/ssd.Test/Call"
    assert b"Holmes" not in body
