"""A limit of time for slow machines."""

import time

import pytest

BEGAN = time.monotonic()


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, help="skip tests that have not begun after this time")


def pytest_runtest_setup(item):
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip(f"NOT TESTED: the limit of {minutes:g} minutes is over")
