"""Traces of calls, optional, through OpenTelemetry's own instrumentation of gRPC.

A span is a call: a unary one, or a stream from its beginning to its end. Steps within a stream have none; their
latencies are metrics.
"""

from __future__ import annotations

from typing import Any

from ssd.errors import UserError

SERVICE_NAME = "ssd-drafter"


def interceptors(enabled: bool) -> list[Any]:
    """Interceptors for `grpc.aio.server`; none unless `enabled`.

    Spans go to the tracer provider that the process has. If it has none, one is made that exports by OTLP over HTTP, as
    the variables OTEL_... say. Raises UserError if OpenTelemetry is not installed.
    """
    if not enabled:
        return []
    try:
        from opentelemetry.instrumentation.grpc import aio_server_interceptor
        from opentelemetry.trace import ProxyTracerProvider, get_tracer_provider

        if isinstance(get_tracer_provider(), ProxyTracerProvider):
            _export()
    except ImportError:
        raise UserError("reports.tracing needs OpenTelemetry: pip install 'ssd-drafter[otel]'") from None
    return [aio_server_interceptor()]


def _export() -> None:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(
        resource=Resource.create({"service.name": SERVICE_NAME}).merge(OTELResourceDetector().detect()),
        # Events hold the messages of exceptions, in which text of users could stand.
        span_limits=SpanLimits(max_events=0),
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
