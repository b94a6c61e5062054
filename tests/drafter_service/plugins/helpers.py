"""What tests of several plug-ins share: a target, a clock, corpora, lines of logs."""

from __future__ import annotations

import itertools
import logging
import sys
from contextlib import contextmanager
from types import ModuleType


def target(text):
    """Return the target's next token: text that repeats, with a turn here and there."""
    return int(text[-1] * 3 + text[-2] + (len(text) % 11 == 0)) % 7


def plain(prompt, tokens=30):
    """Return the output without drafts."""
    text = list(prompt)
    for _ in range(tokens):
        text.append(target(text))
    return text[len(prompt) :]


def verified(text, draft):
    """Return what a step produces: the accepted tokens of a draft and one more."""
    text, produced = list(text), []
    for token in [*draft, None]:
        text.append(target(text))
        produced.append(text[-1])
        if token != text[-1]:
            break
    return produced


def use_equal_steps(monkeypatch, module):
    """Let the steps that a module of the plug-ins measures take one second each, whatever the machine's speed."""
    ticks = itertools.count()
    monkeypatch.setattr(f"drafter_service.plugins.{module}.perf_counter", lambda: float(next(ticks)))


def stand_in(members, monkeypatch):
    """Put modules of a host that is not installed into `sys.modules`; members: values by name, by module."""
    for path, values in members.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            if package not in sys.modules:
                module = ModuleType(package)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, package, module)
                if end > 1:
                    monkeypatch.setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module, raising=False)
        for name, value in values.items():
            monkeypatch.setattr(sys.modules[path], name, value, raising=False)


def session_of(plugin):
    """Return the session of an object that users have, which does not show it."""
    return plugin._session


def corpus_of(session, adapter="", salt=""):
    """Return the corpus of an embedded drafter, which has indexed what it learned."""
    corpus = session.namespaces.find(adapter, salt).drafter.corpus
    corpus.refresh()
    return corpus


@contextmanager
def lines_of(log):
    """Yield the lines that a plug-in writes to its host's log."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log.logger.addHandler(handler)
    log.setLevel(logging.WARNING)  # The host itself, where it is installed, may have set another one above it.
    yield lines
    log.setLevel(logging.NOTSET)
    log.logger.removeHandler(handler)
