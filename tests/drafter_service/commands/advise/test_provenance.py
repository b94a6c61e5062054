"""Where accepted drafts came from."""

import numpy as np

from drafter_service.commands.advise.trials import EVERY, Tracer
from ssd import Corpus
from ssd.replay import Step
from ssd.types import DraftBatch, Path, Source
from tests.replay import recording_of
from tests.strategies import array

OUTPUT = list(range(20, 40))


def test_drafts_from_running_requests_are_left_out():
    recording = recording_of([([1], OUTPUT)] * 2)
    corpus = Corpus(20_000)
    tracer = Tracer(recording, corpus)

    def observe(request, draft, source=Source.CORPUS):
        """Record a step that accepts a draft."""
        step = Step(recording, np.zeros((4, 2), np.int64), max_draft=len(draft))
        step.add(request)
        step.verify(DraftBatch.from_paths([Path(array(draft), np.ones(len(draft), np.float32), source)]))
        tracer.observe(step)

    def trace(source):
        """Record as many steps of the second request as are needed for one draft to be traced."""
        for _ in range(EVERY):
            observe(1, OUTPUT[:4], source)

    trace(Source.CORPUS)
    assert tracer.origins == []
    trace(Source.LOCAL)
    assert [origin.source for origin in tracer.origins] == [-1]
    observe(0, OUTPUT)
    tracer.remember(array([1, *OUTPUT]), None, 0)
    corpus.refresh()
    assert tracer._ends == [corpus.indexed]
    trace(Source.CORPUS)
    assert [(origin.source, origin.accepted) for origin in tracer.origins] == [(-1, 4), (0, 4)]
