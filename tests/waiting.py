"""Waiting for what other threads and processes do."""

import time

TIMEOUT_S = 60
"""Timeout of operations, long enough for busy machines."""


def eventually(condition, timeout_s=TIMEOUT_S):
    """Wait until `condition` returns a true value; return the value."""
    until = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < until, "the condition did not become true"
        time.sleep(0.002)
    return value
