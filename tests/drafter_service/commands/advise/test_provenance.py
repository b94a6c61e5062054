"""Where accepted drafts came from."""

from drafter_service.commands.advise.provenance import EVERY, Tracer
from ssd import Corpus
from tests.drafter_service.commands.advise.logs import traffic_of
from tests.strategies import array

OUTPUT = list(range(20, 40))


def test_drafts_from_running_requests_are_left_out():
    traffic = traffic_of([([1], OUTPUT), ([2], OUTPUT)])
    corpus = Corpus(20_000)
    tracer = Tracer(traffic, corpus)
    for _ in range(EVERY):
        tracer.accept(1, len(traffic.tokens), 4, is_shared=True)
    assert tracer.origins.sources == []
    for _ in range(EVERY):
        tracer.accept(1, len(traffic.tokens), 4, is_shared=False)
    assert tracer.origins.sources == [-1]
    corpus.append(array(OUTPUT))
    corpus.refresh()
    tracer.finish(0)
    for _ in range(EVERY):
        tracer.accept(1, len(traffic.tokens), 4, is_shared=True)
    assert tracer.origins.sources == [-1, 0]
