"""Fixtures for tests of the service and its clients."""

import itertools

import pytest

numbers = itertools.count()


@pytest.fixture
def name():
    """Return the name of a namespace that no other test uses."""
    return f"test-{next(numbers)}"
