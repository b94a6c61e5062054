import pytest

from drafter_service.plugins.connection_log import SAME_LOSS_S, ConnectionLog

LOST = "no connection to the drafter at unix:/run/ssd.sock ({}); continuing without drafts"
RESUMED = "reconnected to the drafter at unix:/run/ssd.sock; drafting resumes"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def reports():
    return []


@pytest.fixture
def log(clock, reports):
    return ConnectionLog("unix:/run/ssd.sock", reports.append, clock)


def test_a_loss_of_several_connections_is_reported_once_and_so_is_its_end(log, reports, clock):
    for number in range(2):
        clock.now += 2 * SAME_LOSS_S
        log.lost("it ended the stream")
        log.lost("connection reset")
        clock.now += 2 * SAME_LOSS_S
        log.lost("it ended the stream")
        log.resumed()
        log.resumed()
        assert reports == [LOST.format("it ended the stream"), RESUMED] * (number + 1)


def test_a_refused_connection_hides_no_other_loss(log, reports, clock):
    log.lost("no permission")
    clock.now += 2 * SAME_LOSS_S
    log.lost("it ended the stream")
    log.resumed()
    assert reports == [LOST.format("no permission"), LOST.format("it ended the stream"), RESUMED]
