"""The log of requests: hashes of ids, and its size; tests.ssd.corpus.test_history compares it with a list."""

import pytest

from ssd.corpus.requests import NO_NAME, RequestLog, hash_of


def test_request_ids_are_hashed():
    assert hash_of(None) == NO_NAME
    assert hash_of("a") == hash_of("a") != hash_of("b")
    assert hash_of("") != NO_NAME
    assert -(1 << 63) <= hash_of("ä\ud800") < 1 << 63


@pytest.mark.parametrize("kept", [1, 700])
def test_a_log_stays_small_when_it_drops_as_it_grows(kept):
    log = RequestLog()
    for number in range(20_000):
        log.add(10 * number, number, float(number))
        log.drop_before(10 * (number - kept))
    assert log.rows["name"].tolist() == list(range(19_999 - kept, 20_000))
    assert log.nbytes <= 4 * 24 * 1024
