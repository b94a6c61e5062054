"""Fixtures for tests of clients over real sockets."""

import pytest

from drafter_service.client import DrafterClient
from tests.drafter_service.client_wire import counting
from tests.drafter_service.fake_server import TIMEOUT_S, FakeService, fake_server_thread


@pytest.fixture(params=[False, True], ids=["grpc", "steps"])
def fake(socket_address, request):
    """Yield a fake service, over gRPC or over the step socket."""
    with fake_server_thread(socket_address, FakeService(counting), has_steps=request.param) as server:
        yield server


@pytest.fixture
def connect(socket_address):
    """Return a function that connects clients, with long deadlines for busy machines; all are closed at the end."""
    clients = []

    def connected(**options):
        clients.append(DrafterClient(socket_address, **{"deadline_s": TIMEOUT_S, **options}))
        return clients[-1]

    yield connected
    for client in clients:
        client.close()
