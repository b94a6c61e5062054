"""An engine without a model: an output counts up from the first token of its prompt, two tokens per step, the first of
them drafted.

Each draft has two tokens: an accepted one from the corpus, and a rejected one from the request's own text.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np

from engine.config import ContextWindow
from engine.drafters.base import Drafter
from engine.drafters.sources import DraftCounts
from engine.scheduling.report import StepReport
from engine.scheduling.request import Completion, FinishReason
from engine.scheduling.result import ResultArrays
from engine.scheduling.table import ADMISSION, COLUMNS, SEQUENCE_ID
from ssd.errors import Failures, UserError
from ssd.types import Source

PAGES, PAGE_SIZE = 64, 16
SOURCES = np.array([Source.CORPUS, Source.LOCAL], np.uint8)


def results_of(results):
    """Arrays of results: id, tokens, parents and sources of the draft, and its accepted nodes, of each sequence."""
    depths = []
    for _, _, parents, _, _ in results:
        own = []
        for parent in parents:
            own.append(1 + (own[parent] if parent >= 0 else 0))
        depths.append(max(own, default=0))
    return ResultArrays(
        np.array([each[0] for each in results], np.int64),
        np.array([len(each[1]) for each in results], np.int64),
        np.array([token for each in results for token in each[1]], np.uint32),
        np.array([len(each[4]) for each in results], np.int64),
        np.array(depths, np.int64),
        np.array([source for each in results for source in each[3]], np.uint8),
        np.array([each[3][node] for each in results for node in each[4]], np.uint8),
        {},
    )


class FakeDrafter(Drafter):
    """Has corpora, and does not draft."""

    def __init__(self, *corpora):
        self._corpora = corpora

    def corpora(self, adapter=None):
        return self._corpora

    def propose(self, plan):
        raise NotImplementedError


class FakeEngine:
    """Uses one page per request. Runs only while `gate` is set, and fails after `fail_after` steps."""

    max_draft = 2
    window = ContextWindow(100, 100)
    model = SimpleNamespace(vocab_size=1000, eos_token_ids=(0,))
    drafter = FakeDrafter(SimpleNamespace(tokens=7, capacity=9))
    drafter_failures = Failures()

    def __init__(self, fail_after=None):
        self.requests, self.cancelled, self.steps, self.fail_after = {}, [], 0, fail_after
        self.gate = threading.Event()
        self.gate.set()
        self._next = 0

    @property
    def scheduler(self):
        pages = SimpleNamespace(free_count=PAGES - len(self.requests), count=PAGES, page_size=PAGE_SIZE)
        return SimpleNamespace(
            running=[SimpleNamespace(sequence_id=sequence_id) for sequence_id in self.requests],
            table=SimpleNamespace(state=self._state()),
            waiting=[],
            preemptions=0,
            has_work=bool(self.requests) and self.gate.is_set(),
            pages=pages,
        )

    def _state(self):
        state = np.zeros((1 + len(self.requests), COLUMNS), np.int64)
        state[1:, SEQUENCE_ID] = state[1:, ADMISSION] = list(self.requests)
        return state

    def add(self, request):
        if len(request.prompt) == 0:
            raise UserError("the prompt is empty; give at least one token")
        self._next += 1
        self.requests[self._next] = (request, [])
        return self._next

    def cancel(self, sequence_id):
        request, out = self.requests.pop(sequence_id)
        self.cancelled.append((request, out))
        return Completion(np.array(out, np.uint32), FinishReason.ABORT, len(out) // 2, len(out), 1)

    def step(self):
        self.steps += 1
        if self.fail_after is not None and self.steps > self.fail_after:
            raise RuntimeError("on purpose")
        report, produced = StepReport(), []
        for sequence_id, (request, out) in list(self.requests.items()):
            first = int(request.prompt[0]) + len(out)
            new = list(range(first, first + min(2, request.sampling.max_tokens - len(out))))
            out += new
            produced.append((sequence_id, new))
            if len(out) == request.sampling.max_tokens:
                output = np.array(out, np.uint32)
                reason = FinishReason.STOP if request.sampling.stop_token_ids else FinishReason.LENGTH
                report.finished[sequence_id] = Completion(
                    output, reason, len(out) // 2, len(out), 1, by_source={"corpus": DraftCounts(1, 1)}
                )
                del self.requests[sequence_id]
        report.arrays = results_of([(sequence_id, new, [-1, 0], SOURCES, [0]) for sequence_id, new in produced])
        return report

    def close(self):
        pass
