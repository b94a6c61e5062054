"""Shadow mode: withheld drafts are scored as if an engine had verified them, apart from all other counters."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.server.session import Session
from drafter_service.server.shadow import MAX_WAITING, ShadowDrafter
from drafter_service.settings.tree import Limits
from drafter_service.stubs import drafter_pb2 as pb
from ssd.budget.padding import Padding
from ssd.config import DrafterConfig
from ssd.types import Progress
from tests.drafter_service.raw import batch, finish, start
from tests.drafter_service.server.opened_namespaces import answered, still_namespace
from tests.replay import accepted_path, drafter_of, progress_of
from tests.strategies import array, examples

CONFIG = DrafterConfig(capacity=50_000, refresh_interval_s=3600)
LIMIT = 8
NO_TOKENS = np.empty(0, np.uint32)
REQUESTS = [
    (np.arange(0, 20, dtype=np.uint32), array([*range(20, 60), 999, *range(61, 90)])),
    (np.arange(5, 25, dtype=np.uint32), array([*range(25, 70), 7, 7, 7, 7, 7, 7, 70, 71])),
    (np.arange(200, 210, dtype=np.uint32), array([*range(210, 230), *range(40, 60)])),
]
KNOWN = [list(range(100)), list(range(30, 60)) * 2, list(range(200, 260))]


@pytest.fixture
def namespace():
    with still_namespace(CONFIG, KNOWN) as namespace:
        yield namespace


def counts(stats):
    return {name: table.tolist() for name, table in stats.counters._asdict().items()}


def shadow_of(known, **settings):
    """Return a drafter that withholds its drafts, over a corpus with some requests."""
    with drafter_of(known, **settings) as drafter:
        return ShadowDrafter(drafter.config, corpus=drafter.corpus)


def verify(drafter, sequence_id, prompt, output, limit=LIMIT):
    """Run a request on an engine that verifies its drafts. The slow twin of `ShadowDrafter`."""
    drafter.start(sequence_id, prompt)
    done, last, verified = 0, NO_TOKENS, 0
    while done < len(output):
        drafts = drafter.draft(progress_of({sequence_id: last}, limit, verified))
        verified = len(drafts.tokens)
        last = output[done : done + len(accepted_path(drafts, 0, output[done:])) + 1]
        done += len(last)
    drafter.finish(sequence_id, last, verified=verified)


@st.composite
def cut(draw):
    """Return the requests with outputs in pieces, as an engine without drafts reports them."""
    requests = []
    for prompt, output in REQUESTS:
        places = sorted(draw(st.sets(st.integers(1, len(output)), max_size=8)))
        requests.append((prompt, np.split(output, [place for place in places if draw(st.booleans())])))
    return requests


@examples(50)
@given(cut(), st.sampled_from(["path", "tree"]))
def test_the_drafter_is_called_as_by_an_engine_that_verifies_drafts(requests, shape):
    with shadow_of(KNOWN, draft_shape=shape) as shadow, drafter_of(KNOWN, draft_shape=shape) as other:
        for number, (prompt, pieces) in enumerate(requests):
            verify(other, number, prompt, np.concatenate(pieces))
            shadow.start(number, prompt)
            for piece in [NO_TOKENS, *pieces[:-1]]:
                assert not len(shadow.draft(Progress.of_one(number, piece, max_draft=LIMIT)).tokens)
            shadow.finish(number, pieces[-1], learn=True)
        assert counts(shadow.stats) == counts(other.stats)
        assert shadow.corpus.appended == other.corpus.appended


def test_the_drafts_of_all_running_sequences_of_a_stream_are_withheld_or_none(namespace):
    padding = Padding(sizes=(8, 16))
    session = Session(namespace, Limits(), draft_shape="tree", padding=padding)
    for shadow in (True, False):
        answered(session, starts=[start(1, [1], shadow=shadow)])
        mixed = pb.DraftRequest(starts=[start(2, [1], shadow=not shadow)])
        assert "use one stream with shadow" in session.answer(mixed, may_learn=True).error.message
        [drafter] = namespace.drafters
        assert (drafter.config.draft_shape, drafter.budget.curve.padding(1)) == ("tree", padding)
        assert isinstance(drafter, ShadowDrafter) == shadow
        answered(session, finishes=[finish(1)])


def test_tokens_before_the_first_draft_are_a_step_each():
    with shadow_of(KNOWN) as drafter:
        drafter.start(1, array(range(10)))
        drafter.draft(Progress.of_one(1, array([500, 501, 502]), max_draft=LIMIT))
        assert (drafter.stats.steps, drafter.stats.committed) == (3, 3)


def test_many_tokens_at_once_are_steps_without_drafts():
    with shadow_of([range(2 * MAX_WAITING)]) as drafter:
        drafter.start(1, array(range(10)))
        drafter.draft(Progress.of_one(1, NO_TOKENS, max_draft=LIMIT))
        offered = drafter.running.offered()[1]
        drafter.finish(1, array(range(10, 11 + MAX_WAITING)), learn=False)
        assert drafter.stats.committed == MAX_WAITING + 1
        assert drafter.stats.accepted == offered > 0
        assert drafter.stats.steps == MAX_WAITING + 1 - offered


# --- An engine whose sequences have `shadow` set


@pytest.mark.parametrize("why", ["private", "forgotten", "cancelled", "right"])
def test_withheld_sequences_are_learned_as_others(namespace, why):
    session = Session(namespace, Limits())
    begun = start(1, range(300, 310), learn=why != "private", request_id="a", shadow=True)
    for request in (
        pb.DraftRequest(starts=[begun], batch=batch({1: ()})),
        pb.DraftRequest(batch=batch({1: [310]})),
        pb.DraftRequest(finishes=[finish(1, [311, 312], learn=why != "cancelled")]),
    ):
        if request.finishes and why == "forgotten":
            namespace.forget("a")
        session.answer(request, may_learn=why != "right")
    assert namespace.corpus.appended == sum(map(len, KNOWN))
    assert namespace.shadow.committed == 3
