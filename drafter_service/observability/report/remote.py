"""Reports of a running service."""

from __future__ import annotations

import json

import grpc
from pydantic import ValidationError

from drafter_service.commands.connection import Link
from drafter_service.observability.report import units
from drafter_service.observability.report.schema import SCHEMA_VERSION, Report
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs import drafter_pb2_grpc
from ssd.errors import UserError

TIMEOUT_S = 10.0
MAX_REPORT_BYTES = 256 << 20

DENIED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def fetch_report(link: Link, namespace: str = "", passages: bool = False) -> Report:
    """The report of a running service, of one namespace or of all that the caller may see.

    Raises UserError with the reason if there is none to be had.
    """
    connector = link.connector()
    request = pb.ReportRequest(namespace=namespace, passages=passages)
    with connector.open([("grpc.max_receive_message_length", MAX_REPORT_BYTES)]) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        try:
            answer = stub.Report(request, timeout=TIMEOUT_S, metadata=connector.metadata())
        except grpc.RpcError as error:
            raise UserError(_reason(error, link.server)) from None
    return read_report(answer.json, link.server)


def read_report(document: str, where: str) -> Report:
    """A report from JSON. Raises UserError for one that this version cannot read; `where` it came from."""
    try:
        return Report.model_validate_json(document)
    except ValidationError as problem:
        version = _version_of(document)
        if version not in (None, SCHEMA_VERSION):
            raise UserError(
                f"{where} writes reports of version {units.shortened(str(version))}, and this ssd-drafter reads "
                f"version {SCHEMA_VERSION}; use the ssd-drafter that runs there"
            ) from None
        first = problem.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"])) or "the document"
        raise UserError(f"what {where} answers is no report ({field}: {first['msg']}); is it a drafter?") from None


def _reason(error: grpc.RpcError, where: str) -> str:
    code, details = error.code(), units.shortened(str(error.details() or ""), 300)
    if code == grpc.StatusCode.UNAVAILABLE:
        return f"no drafter answers at {where}; start one with: ssd-drafter serve --listen {where}"
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the drafter at {where} has not answered within {TIMEOUT_S:.0f} s; is it overloaded, or stopped?"
    if code in DENIED:
        return f"{where} refuses the report: {details or 'a report needs the right to administer'}"
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return f"the drafter at {where} makes no reports; update it, or use --snapshot"
    return f"{where} makes no report: {details or code.name}"


def _version_of(document: str) -> object:
    try:
        parsed = json.loads(document)
    except ValueError:
        return None
    return parsed.get("schema_version") if isinstance(parsed, dict) else None
