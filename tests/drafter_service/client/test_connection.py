"""When a client tries to connect again, and how it describes a service that refuses."""

from random import Random

import grpc

from drafter_service.client.connection import (
    FIRST_BACKOFF_S,
    GOOD_RESPONSES,
    LONGEST_BACKOFF_S,
    ConnectionState,
    StreamEnd,
)
from drafter_service.client.streams import StreamError
from ssd.errors import UserError


def test_waits_between_attempts_are_random_parts_of_a_doubling_interval():
    class Longest(Random):
        def uniform(self, low, high):
            assert low == 0
            return high

    def respond(times):
        for _ in range(times):
            state.response_received()

    gone = StreamEnd("gone", UserError("gone"))
    state = ConnectionState("host:1", Longest())
    waits = [state.ended(gone)[0] for _ in range(100)]
    assert waits[:4] == [FIRST_BACKOFF_S * factor for factor in (1, 2, 4, 8)]
    assert max(waits) == waits[-1] == LONGEST_BACKOFF_S
    for _ in range(2):  # A stream that fails after a few responses does not shorten the waits.
        respond(GOOD_RESPONSES - 1)
        assert state.ended(gone) == (LONGEST_BACKOFF_S, None)
    respond(GOOD_RESPONSES)
    assert state.ended(gone) == (FIRST_BACKOFF_S, "gone")
    first, second = ([ConnectionState("host:1", Random(seed)).ended(gone)[0] for seed in (1, 2)] for _ in range(2))
    assert first == second
    assert first[0] != first[1]


def test_a_service_that_is_not_ready_says_what_it_does():
    state = ConnectionState("host:1", Random())
    reason = "not ready: compiling kernels: 40 %"
    state.ended(state.end_of(StreamError(grpc.StatusCode.UNAVAILABLE, reason)))
    assert str(state.failure) == f"the drafter at host:1 is {reason}"
