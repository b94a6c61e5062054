"""Which losses of connections are worth a line of a host's log, and how drafters are closed."""

import threading
from types import SimpleNamespace

import pytest

from drafter_service.client.copies import TRUSTED_S
from drafter_service.plugins.namespaces import ConnectionLog, HostNamespaces
from drafter_service.plugins.options import HostLimits
from drafter_service.plugins.settings import PluginSettings

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


def namespaces_of(drafters):
    """Return namespaces that have these drafters, one each."""
    made = HostNamespaces(PluginSettings(), HostLimits(8, 50), print, print, lambda _, salt: drafters[int(salt)])
    for number in range(len(drafters)):
        made.find("", str(number))
    return made


def test_drafters_are_closed_at_the_same_time(monkeypatch):
    monkeypatch.setattr("drafter_service.plugins.namespaces.CLOSE_S", 60)
    closing, closed = threading.Barrier(3), []

    def close():
        closing.wait(10)
        closed.append(True)

    namespaces_of([SimpleNamespace(close=close)] * 3).close()
    assert len(closed) == 3


def test_a_drafter_that_does_not_close_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("drafter_service.plugins.namespaces.CLOSE_S", 0.01)
    may_close = threading.Event()
    namespaces = namespaces_of([SimpleNamespace(close=lambda: may_close.wait(60))] * 3)
    namespaces.close()
    assert (may_close.is_set(), len(namespaces.opened)) == (False, 0)
    may_close.set()
