"""What tests of several plug-ins share: a target, a clock, corpora, lines of logs."""

from __future__ import annotations

import itertools
import logging
from contextlib import contextmanager


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
