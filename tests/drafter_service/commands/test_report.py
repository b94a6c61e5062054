"""`ssd-drafter report` against a real gRPC server."""

import json

import grpc
import pytest
from click.testing import CliRunner

from drafter_service.commands.link import Link
from drafter_service.commands.report import fetch_report, report
from drafter_service.observability.report.build import build_report
from drafter_service.observability.report.schema import Report
from ssd.errors import UserError
from tests.drafter_service.observability.report.samples import Reporter, busy_namespace, reporting, service

MADE = build_report(service(busy_namespace()))
DOCUMENT = MADE.model_dump_json()


def link_to(address):
    return Link(address=address)


def run(command, *arguments):
    """Run a command. Raises its UserError."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False, color=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize(
    ("reporter", "reason"),
    [
        (Reporter('{"schema_version": 7}'), "a report of version 5, which this ssd-drafter reads (schema_version: "),
        (Reporter('{"schema_version": 5}'), "(taken_at: Field required"),
        (Reporter("hello"), "use the ssd-drafter that runs there"),
        (Reporter(refusal=(grpc.StatusCode.PERMISSION_DENIED, "not\x1byours")), "refused: not\ufffdyours"),
        (Reporter(refusal=(grpc.StatusCode.INTERNAL, "")), "refused: INTERNAL"),
        (Reporter(refusal=(grpc.StatusCode.CANCELLED, "CANCELLED")), "was stopped before it had answered; start one"),
        (Reporter(refusal=(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")), "(no answer in time)"),
    ],
)
def test_failures_are_explained_in_one_line(socket_address, reporter, reason):
    with reporting(socket_address, reporter), pytest.raises(UserError) as raised:
        fetch_report(link_to(socket_address))
    assert reason in str(raised.value)
    assert socket_address in str(raised.value)
    assert "\n" not in str(raised.value)


def test_output_as_tables_json_and_page(socket_address, tmp_path):
    reporter = Reporter(json.dumps({**json.loads(DOCUMENT), "unknown": "field"}))
    with reporting(socket_address, reporter):
        assert fetch_report(link_to(socket_address), "team") == MADE
        tables = run(report, "--address", socket_address)
        printed = run(report, "--address", socket_address, "--json", "--html", tmp_path / "out.html")
        quiet = run(report, "--address", socket_address, "--html", tmp_path / "quiet.html")
        with pytest.raises(UserError, match="cannot write"):
            run(report, "--address", socket_address, "--html", tmp_path / "no" / "out.html")
    assert reporter.requests[0].namespace == "team"
    assert "of the target's steps" in tables.stdout
    assert Report.model_validate_json(printed.stdout) == MADE
    assert "<h3>Calibration</h3>" in (tmp_path / "out.html").read_text()
    assert printed.stderr == f"wrote {tmp_path / 'out.html'}\n"
    assert quiet.stdout == ""
