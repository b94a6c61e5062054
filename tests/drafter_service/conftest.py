"""Fixtures for tests of the service and its clients."""

import itertools

import pytest

from tests.waiting import TIMEOUT_S

numbers = itertools.count()


@pytest.fixture(autouse=True)
def patient_clients(monkeypatch):
    """Let clients wait for a service that is there for as long as it takes on a busy machine."""
    monkeypatch.setattr("drafter_service.client.client.CONNECT_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr("drafter_service.client.client.CLOSE_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr("drafter_service.transport.address.PROBE_TIMEOUT_S", TIMEOUT_S)


@pytest.fixture
def name():
    """Return the name of a namespace that no other test uses."""
    return f"test-{next(numbers)}"
