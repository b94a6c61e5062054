"""Shadow mode: withheld drafts are scored as if an engine had verified them, apart from all other counters."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.observability.report.build import namespace_report
from drafter_service.server.admin import SCORED_PER_TURN, learn
from drafter_service.server.namespace import BURST_S, SHARE, ClosedError, TimeBudget
from drafter_service.server.session import Session
from drafter_service.server.shadow import MAX_WAITING, ShadowDrafter
from drafter_service.settings.tree import Limits
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import pack
from ssd.budget.padding import Padding
from ssd.config import DrafterConfig
from ssd.types import Progress
from tests.drafter_service.raw import batch, finish, start, texts
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
    assert namespace.shadow.observed == 1


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
    assert namespace.shadow.stats.committed == 3


# --- Finished texts with their prompts


def requests_message(*requests, names=()):
    message = texts(*(np.concatenate(request) for request in requests), names=names)
    message.prompt_lengths = pack(array([len(prompt) for prompt, _ in requests]), "u4")
    return message


def observe(namespace, *requests, names=()):
    async def act():
        total = pb.ObserveResponse()
        await learn(namespace, requests_message(*requests, names=names), total)
        return total

    return asyncio.run(act())


def test_observed_requests_are_scored_before_they_are_learned(namespace):
    with still_namespace(CONFIG, KNOWN) as twin:
        for number, (prompt, output) in enumerate(REQUESTS * 2):
            observe(namespace, (prompt, output))
            namespace.corpus.refresh()
            verifying = twin.new_drafter()
            verify(verifying, number, prompt, output, limit=namespace.config.max_draft)
            twin.release(verifying)
            twin.corpus.refresh()
        assert counts(namespace.shadow.stats) == counts(twin.stats)
        assert namespace.corpus.appended == twin.corpus.appended, "of a prompt, the end is learned"
    report = namespace_report(namespace.facts(), 0.0)
    assert (report.shadow.observed_requests, report.shadow.scored_requests) == (6, 6)
    assert report.shadow.drafting.committed == 2 * sum(len(output) for _, output in REQUESTS)
    assert report.drafting.steps == 0
    assert not namespace.drafters


def test_a_request_is_observed_once(namespace):
    observe(namespace, REQUESTS[0], REQUESTS[0], REQUESTS[1], names=["a", "a", "b"])
    assert observe(namespace, REQUESTS[0], names=["a"]).duplicates == 1
    assert namespace.shadow.observed == 2


def test_requests_are_scored_while_there_is_time(namespace):
    now = [0.0]
    namespace.shadow_budget = TimeBudget(clock=lambda: now[0])
    with namespace.shadow_budget.spend():
        now[0] += BURST_S + 1
    observe(namespace, *REQUESTS)
    assert (namespace.shadow.observed, namespace.shadow.scored) == (3, 0)
    now[0] += 10.5 / SHARE
    observe(namespace, *REQUESTS)
    assert (namespace.shadow.observed, namespace.shadow.scored) == (6, 3)


def test_scoring_takes_its_share_of_the_time():
    now, spent = [0.0], 0.0
    budget = TimeBudget(clock=lambda: now[0])
    while now[0] < 1000:
        if budget.is_left():
            with budget.spend():
                now[0] += 0.7
                spent += 0.7
        now[0] += 0.1
    assert spent == pytest.approx(SHARE * 1000 + BURST_S, abs=1)


def test_scoring_ends_when_the_namespace_is_dropped(namespace):
    async def act():
        long = (np.arange(10, dtype=np.uint32), np.arange(10, 2000, dtype=np.uint32) % 100)
        scoring = asyncio.create_task(learn(namespace, requests_message(long), pb.ObserveResponse()))
        while not namespace.shadow.stats.steps:
            await asyncio.sleep(0)
        namespace.close()
        with pytest.raises(ClosedError):
            await scoring

    asyncio.run(act())


def test_other_tasks_run_while_a_request_is_scored(namespace):
    async def act():
        output = np.arange(2000, dtype=np.uint32) * 7919 % 1000
        scoring = asyncio.create_task(learn(namespace, requests_message((NO_TOKENS, output)), pb.ObserveResponse()))
        turns = 0
        while not scoring.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert asyncio.run(act()) > 2000 // SCORED_PER_TURN
