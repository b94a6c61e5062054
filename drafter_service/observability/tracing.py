"""Optional traces of calls, through OpenTelemetry's instrumentation of gRPC.

A unary call is a span, and so is a whole stream. Steps within a stream have no spans; their latencies are metrics.
"""

from __future__ import annotations

from typing import Any

from ssd.errors import UserError

SERVICE_NAME = "ssd-drafter"


def interceptors(enabled: bool) -> list[Any]:
    """Return interceptors for `grpc.aio.server`; none unless `enabled`.

    Spans go to the tracer provider of the process. If there is none, create one that exports by OTLP over HTTP and is
    configured by the environment variables OTEL_... Raises UserError if OpenTelemetry is not installed.
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
        # Events contain the messages of exceptions, which could contain text of users.
        span_limits=SpanLimits(max_events=0),
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
