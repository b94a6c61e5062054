"""A clock by which all steps of a host take the same time, so that drafts do not depend on the machine's speed."""

import itertools


def use_equal_steps(monkeypatch, module):
    """Let the steps that a module of the plug-ins measures take one second each."""
    ticks = itertools.count()
    monkeypatch.setattr(f"drafter_service.plugins.{module}.perf_counter", lambda: float(next(ticks)))
