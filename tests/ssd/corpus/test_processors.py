import os

import pytest

from ssd.corpus.processors import usable_processors


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no affinity")
def test_only_processors_that_the_process_may_run_on_count():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_processors() == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_all_processors_count_without_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_processors() == {0, 1, 2}
