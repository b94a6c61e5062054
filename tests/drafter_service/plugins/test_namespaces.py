"""Which losses of connections are worth a line of a host's log."""

import pytest

from drafter_service.client.copies import TRUSTED_S
from drafter_service.plugins.namespaces import ConnectionLog

LOST = "no connection to the drafter at unix:/run/ssd.sock ({}); continuing without drafts"
RESUMED = "reconnected to the drafter at unix:/run/ssd.sock; drafting resumes"


@pytest.fixture
def reports():
    return []


@pytest.fixture
def log(reports):
    return ConnectionLog("unix:/run/ssd.sock", reports.append)


def test_a_loss_of_several_connections_is_reported_once_and_so_is_its_end(log, reports):
    for number in range(2):
        log.lost("it ended the stream", is_refused=False)
        log.lost("connection reset", is_refused=False)
        log.lost("it ended the stream", is_refused=False)
        log.resumed()
        log.resumed()
        assert reports == [LOST.format("it ended the stream"), RESUMED] * (number + 1)


def test_refused_connections_and_losses_do_not_hide_each_other(log, reports):
    log.lost("no permission", is_refused=True)
    log.lost("it ended the stream", is_refused=False)
    log.lost("another tokenizer", is_refused=True)
    log.lost("another tokenizer", is_refused=True)
    log.resumed()
    reasons = ["no permission", "it ended the stream", "another tokenizer"]
    assert reports == [*map(LOST.format, reasons), RESUMED]


def test_a_loss_says_what_drafts_come_from_meanwhile(reports):
    log = ConnectionLog("unix:/run/ssd.sock", reports.append, has_copy=True)
    log.lost("there is no socket", is_refused=False)
    log.has_welcome = True
    log.resumed()
    log.lost("connection reset", is_refused=False)
    first, _, line = reports
    assert first.endswith("continuing with drafts from running requests alone")
    assert f"with drafts from the copy for at most {TRUSTED_S:.0f} s, then from running requests" in line
