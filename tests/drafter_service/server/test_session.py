"""The sequences of one stream, without sockets: effects of requests, and refusals."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from drafter_service.observability.facts import MAX_ENGINES, OTHER_ENGINES, Engine, ModelIdentity
from drafter_service.server.session import Session
from drafter_service.server.shadow import ShadowDrafter
from drafter_service.settings.tree import Limits
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import MAX_FIELDS, batch_message, pack
from ssd.config import DrafterConfig
from ssd.corpus.rollout import Rollout
from ssd.drafter import SuffixDrafter
from ssd.stats import Stats
from ssd.types import StepTime, offsets_of
from tests.drafter_service.raw import batch, drafted, drafts_in, finish, lost, start
from tests.drafter_service.server.opened_namespaces import StillCorpus, still_namespace
from tests.replay import progress_of
from tests.strategies import array, examples

CONFIG = DrafterConfig(capacity=10_000, refresh_interval_s=3600, learned_prompt_tokens=3)
INVALID_ARGUMENT = 3


@pytest.fixture
def namespace():
    with still_namespace(CONFIG) as namespace:
        yield namespace


@pytest.fixture
def session(namespace):
    return Session(namespace, Limits())


def send(session, *, may_learn=True, **fields):
    response = session.answer(pb.DraftRequest(**fields), may_learn=may_learn)
    session.record()
    return response


def sizes_of(session):
    """Return the number of tokens of each sequence."""
    sizes = sizes_in(session._drafter)
    assert session._tokens == sum(sizes.values())
    return sizes


def sizes_in(drafter):
    waiting_of = drafter.waiting_of if isinstance(drafter, ShadowDrafter) else lambda _: 0
    return {each: drafter.running.size_of(each) + waiting_of(each) for each in drafter.running.ids}


def refused(response, message):
    assert response.error.code == INVALID_ARGUMENT
    assert message in response.error.message
    return True


def test_refusals_name_the_field_and_have_no_effect(session):
    send(session, starts=[start(1, [5, 6, 5])])
    again = [start(2, [1]), start(1, [1])]
    assert refused(send(session, step=2, starts=again), "starts contains a sequence that is already running")
    assert refused(send(session, starts=[start(3, [1]), start(3, [1])]), "starts contains a sequence that is already")
    assert refused(send(session, finishes=[finish(1), finish(1)]), "finishes contains a sequence twice")
    claims = batch({1: ()})
    claims.verified = pack(array([1]), "u4")
    assert refused(send(session, batch=claims), "batch: sequence 1 was offered 0 tokens; it cannot have verified 1")
    claims.verified = pack(array([0xFFFF_FFFF]), "u4")
    assert refused(send(session, batch=claims), "it cannot have verified 4294967295")
    new = batch({2: ()}, verified=1)
    assert refused(send(session, starts=[start(2, [1])], batch=new), "sequence 2 was offered 0 tokens")
    no_draft = "finishes[0].verified is 1; the sequence's last draft had 0 tokens"
    assert refused(send(session, finishes=[finish(1, verified=1)]), no_draft)
    assert refused(send(session, starts=[start(2, [1])], finishes=[finish(2, verified=1)]), no_draft)
    bad_prompt = pb.Start(sequence_id=2, prompt=b"12345")
    assert refused(send(session, starts=[bad_prompt]), "starts[0].prompt has 5 bytes")
    crowd = pb.Batch(sequence_ids=bytes(8 * (MAX_FIELDS + 1)))
    assert refused(send(session, batch=crowd), f"batch.sequence_ids has {MAX_FIELDS + 1} elements")
    # Sequence 1 still runs, and the others were not started.
    assert sizes_of(session) == {1: 3}
    response = send(session, step=9, starts=[start(2, [8])], batch=batch({2: (), 1: ()}, limit=2))
    assert [drafted(response, 2, index) for index in (0, 1)] == [[], [6, 5]]


TOKENS = st.lists(st.integers(0, 3), max_size=6)
IDS = st.integers(0, 5)


class LikeAnEmbeddedDrafter(RuleBasedStateMachine):
    """Check that any stream has the drafts, counts and effects that an embedded drafter has for the same calls."""

    def __init__(self):
        super().__init__()
        self.opened = still_namespace(CONFIG)
        self.namespace, self.corpus = self.opened.__enter__(), StillCorpus(CONFIG.capacity, CONFIG.match_depth)
        self.stats, self.withheld_stats = Stats(), Stats()
        self.offered = self.batches = 0
        self.connect(shadow=False)

    def connect(self, shadow):
        self.session = Session(self.namespace, Limits())
        kind, stats = (ShadowDrafter, self.withheld_stats) if shadow else (SuffixDrafter, self.stats)
        self.drafter, self.shadow, self.running = kind(CONFIG, corpus=self.corpus, stats=stats), shadow, set()

    def send(self, **fields):
        response = send(self.session, **fields)
        assert not response.HasField("error"), response.error.message
        return response

    @rule(
        ids=st.sets(IDS, max_size=3),
        prompt=TOKENS,
        learn=st.booleans(),
        ends=st.booleans(),
        may_learn=st.booleans(),
        rollout=st.booleans(),
        session=st.sampled_from(["", "s"]),
    )
    def start(self, ids, prompt, learn, ends, may_learn, rollout, session):
        new = sorted(ids - self.running)
        finishes = [finish(each, [1, 2], learn=True) for each in new] if ends else []
        given = {"shadow": self.shadow, "rollout": pb.Rollout(group="g", version=len(prompt)) if rollout else None}
        starts = [start(each, prompt, learn, session_id=session, **given) for each in new]
        self.send(starts=starts, finishes=finishes, may_learn=may_learn)
        for each in new:
            self.drafter.start(
                each,
                array(prompt),
                learn=learn and may_learn,
                session_id=session or None,
                rollout=Rollout("g", len(prompt)) if rollout else None,
            )
        self.running |= {*new}
        if ends:
            self.end(new, [1, 2], 0, 1, learn=may_learn)

    def end(self, ids, tokens, verified, steps, *, learn):
        for each in [each for each in ids if each in self.running]:
            self.drafter.finish(each, array(tokens), verified=verified, steps=steps, learn=learn)
        self.running -= {*ids}

    def most(self, sequence_id):
        """Return the number of tokens of a sequence's draft."""
        return 0 if self.shadow else max(0, int(self.drafter.running.offered_to([sequence_id])[0]))

    @rule(
        sequence_id=IDS,
        tokens=TOKENS,
        data=st.data(),
        learn=st.booleans(),
        steps=st.integers(1, 3),
        may_learn=st.booleans(),
    )
    def finish(self, sequence_id, tokens, data, learn, steps, may_learn):
        verified = data.draw(st.integers(0, self.most(sequence_id)))
        ends = [finish(sequence_id, tokens, learn, verified=verified, steps=steps)]
        response = self.send(finishes=ends, may_learn=may_learn)
        assert lost(response) == ([] if sequence_id in self.running else [sequence_id])
        self.end([sequence_id], tokens, verified, steps, learn=learn and may_learn)

    @rule(
        chosen=st.lists(IDS, unique=True, max_size=5),
        data=st.data(),
        cost=st.none() | st.sampled_from([0.001, 0.2]),
        has_steps=st.booleans(),
        ends=st.lists(IDS, unique=True, max_size=2),
    )
    def draft(self, chosen, data, cost, has_steps, ends):
        """Request drafts, after the ends of some sequences in the same request."""
        progress = progress_of({each: data.draw(TOKENS) for each in chosen}, limit=4, cost=cost)
        progress.verified[:] = [data.draw(st.integers(0, self.most(each))) for each in chosen]
        if has_steps:
            progress.steps = array([data.draw(st.integers(1, 3)) for _ in chosen])
        progress.verified[:] *= ~np.isin(progress.sequence_ids, ends)
        response = self.send(finishes=[finish(each, [3]) for each in ends], batch=batch_message(progress))
        unknown = [each for each in ends if each not in self.running]
        self.end(ends, [3], 0, 1, learn=True)
        assert lost(response) == unknown + [each for each in chosen if each not in self.running]
        drafted = [index for index, each in enumerate(chosen) if each in self.running]
        expected = self.drafter.draft(part_of(progress, drafted)).scatter(np.array(drafted, int), len(chosen))
        received = drafts_in(response.drafts, len(chosen))
        self.offered, self.batches = self.offered + len(received.tokens), self.batches + 1
        for name in ("tokens", "parents", "accept_prob", "source", "offsets"):
            assert getattr(received, name).tolist() == getattr(expected, name).tolist(), name

    @precondition(lambda self: self.running)
    @rule(damage=st.sampled_from(["cut", "long", "verified", "twice", "offsets", "started"]), data=st.data())
    def refuse(self, damage, data):
        """Send an invalid batch of running sequences, whose effects later drafts would show."""
        wrong = batch({each: [1] for each in self.running}, verified=0)
        if damage == "cut":
            field = data.draw(st.sampled_from(["sequence_ids", "tokens", "offsets", "verified", "max_draft", "steps"]))
            setattr(wrong, field, (getattr(wrong, field) or bytes(4)) + b"1")
        elif damage == "long":
            field = data.draw(st.sampled_from(["tokens", "offsets", "verified", "max_draft"]))
            setattr(wrong, field, getattr(wrong, field) + bytes(4))
        elif damage == "verified":
            wrong.verified = pack(array([5] * len(self.running)), "u4")
        elif damage == "offsets":
            wrong.offsets = pack(array([*range(len(self.running)), 99]), "u4")
        elif damage == "twice":
            wrong = batch_message(part_of(progress_of({min(self.running): [1]}, limit=1), [0, 0]))
        starts = [start(9, [1])] + ([start(min(self.running), [1])] if damage == "started" else [])
        assert send(self.session, batch=wrong, starts=starts).HasField("error")
        if damage != "started":
            assert send(self.session, batch=wrong).HasField("error")

    @rule()
    def refresh(self):
        self.namespace.corpus.refresh()
        self.corpus.refresh()

    @rule(shadow=st.booleans())
    def disconnect(self, shadow):
        self.close_session()
        self.connect(shadow)

    def close_session(self):
        assert sizes_of(self.session) == sizes_in(self.drafter)
        self.session.close()
        self.drafter.close()
        assert not self.namespace.drafters

    def teardown(self):
        self.close_session()
        assert self.namespace.corpus.appended == self.corpus.appended
        [use] = self.namespace.facts().uses.values()
        assert (use.offered, use.engine_steps, use.streams) == (self.offered, self.batches, 0)
        for stats, expected in ((self.namespace.stats, self.stats), (self.namespace.shadow, self.withheld_stats)):
            for count, twin in zip(stats.counters, expected.counters, strict=True):
                assert count.tolist() == twin.tolist()
            versions = [
                {version: totals.requests for version, totals in each.by_version.items()} for each in (stats, expected)
            ]
            assert versions[0] == versions[1]
        self.opened.__exit__(None, None, None)
        self.corpus.close()


def part_of(progress, indices):
    """Return some sequences of a batch."""
    runs = [progress.tokens[progress.offsets[index] : progress.offsets[index + 1]] for index in indices]
    return replace(
        progress,
        sequence_ids=progress.sequence_ids[indices] if indices else progress.sequence_ids[:0],
        tokens=np.concatenate([array([]), *runs]),
        offsets=offsets_of(array([len(run) for run in runs])),
        verified=array([progress.verified[index] for index in indices]),
        max_draft=array([progress.max_draft[index] for index in indices]),
        steps=None if progress.steps is None else array([progress.steps[index] for index in indices]),
        other_sequences=max(0, len(progress.sequence_ids) - len(indices)),
    )


TestLikeAnEmbeddedDrafter = LikeAnEmbeddedDrafter.TestCase
TestLikeAnEmbeddedDrafter.settings = examples(60)


def test_the_engine_that_was_disconnected_for_longest_is_dropped_first(namespace):
    def connect(number):
        return Session(namespace, Limits(), Engine("host/1", str(number)))

    sessions = [connect(number) for number in range(MAX_ENGINES)]
    connect("more")
    assert namespace.facts().uses[OTHER_ENGINES].streams == 1, "all are connected"
    send(sessions[7], starts=[start(1, [5])], batch=batch({1: [6, 7]}))
    for number in (7, 3):
        sessions[number].close()
    for name, dropped in (("x", "7"), ("y", "3")):
        connect(name)
        names = [engine.name for engine in namespace.facts().uses]
        assert name in names
        assert dropped not in names
        assert len(names) == MAX_ENGINES + 1
    assert namespace.stats.committed == 2, "statistics of a dropped engine are kept"


def test_the_text_of_a_sequence_without_a_session_is_not_kept_for_a_later_one(namespace):
    session = Session(namespace, Limits())
    [drafter] = namespace.drafters
    send(session, starts=[start(1, range(2000))], batch=batch({1: ()}))
    send(session, finishes=[finish(1, [1], learn=True)])
    memory = drafter.own_bytes
    drafter.withdraw_all()
    assert drafter.own_bytes == memory


@pytest.mark.parametrize("steps", [[], [1]])
def test_the_sequences_that_were_inactive_for_longest_are_dropped(namespace, steps):
    session = Session(namespace, Limits(sequences=2))
    send(session, starts=[start(1, [1]), start(2, [2])])
    progress = batch({1: [1]})
    progress.steps = pack(array(steps), "u4")
    send(session, batch=progress)
    send(session, starts=[start(3, [3])])
    assert sizes_of(session) == {1: 2, 3: 1}
    assert lost(send(session, batch=batch({1: (), 2: ()}))) == [2]
    send(session, starts=[start(sequence_id, [1]) for sequence_id in range(4, 40)])
    assert sizes_of(session) == {38: 1, 39: 1}
    assert namespace.sequences == 2


def test_the_tokens_of_a_stream_are_bounded(namespace):
    session = Session(namespace, Limits(stream_tokens=100))
    send(session, starts=[start(1, range(60)), start(2, range(30))])
    send(session, batch=batch({2: range(20)}))
    assert sizes_of(session) == {2: 50}
    assert refused(send(session, starts=[start(3, range(101))]), "starts has 101 tokens; a stream may have 100")
    send(session, batch=batch({2: range(51)}))
    assert sizes_of(session) == {}
    assert namespace.corpus.appended == 0


def test_clients_counters_are_summed(namespace):
    def report(session, **totals):
        send(session, counters=pb.ClientCounters(**totals))

    one, other = Engine("host/1", "one"), Engine("host/1", "other")
    first, second = Session(namespace, Limits(), one), Session(namespace, Limits(), other)
    report(first, timeouts=3, dropped=2)
    report(first, timeouts=5, dropped=3)
    report(second, timeouts=10)
    assert (namespace.clients.timeouts, namespace.clients.dropped) == (15, 3)
    # A client that has reconnected sent most of these totals before, and may say which.
    counted = pb.ClientCounters(timeouts=10, reconnects=1)
    report(Session(namespace, Limits(), other, counted=counted), timeouts=5000, dropped=1, reconnects=2)
    assert (namespace.clients.timeouts, namespace.clients.dropped, namespace.clients.reconnects) == (5005, 4, 1)
    again = Session(namespace, Limits(), one)
    report(again, timeouts=4, dropped=3, reconnects=2)
    report(again, timeouts=6, dropped=3, reconnects=2)
    assert (namespace.clients.timeouts, namespace.clients.dropped, namespace.clients.reconnects) == (5007, 4, 2)
    # Steps whose responses came later were counted with their requests.
    late = {engine: (use.late_steps, use.engine_steps) for engine, use in namespace.facts().uses.items()}
    assert late == {one: (7, 4), other: (5000, 4999)}


def test_a_failure_of_the_drafter_is_not_an_unknown_sequence(session, monkeypatch):
    send(session, starts=[start(1, [5, 6, 5])])
    own = session._drafter.draft_unpublished

    def fail_once(batch):
        monkeypatch.setattr(session._drafter, "draft_unpublished", own)
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(session._drafter, "draft_unpublished", fail_once)
    with pytest.raises(ValueError, match="broadcast"):
        send(session, batch=batch({1: ()}))


def test_token_ids_outside_the_vocabulary_are_refused_without_effect(namespace):
    namespace.adopt(ModelIdentity(vocab_size=10))
    session = Session(namespace, Limits())
    known = send(session, starts=[start(1, [5, 6, 5])], batch=batch({1: ()}, limit=1))
    ten = pack(array([10]), "u4")
    for place, fields in {
        "starts[0].prompt": {"starts": [start(2, [9, 10])]},
        "starts[0].committed": {"starts": [start(2, [9], committed=ten)]},
        "starts[0].hints": {"starts": [start(2, [9], hints=ten)]},
        "finishes[0].tokens": {"finishes": [finish(1, [10])]},
        "batch.tokens": {"batch": batch({1: [10]})},
    }.items():
        assert refused(send(session, **fields), f"{place} holds the id 10; the vocabulary has 10 tokens")
    assert drafted(known) == drafted(send(session, batch=batch({1: ()}, limit=1))) == [6]


# What a session learns from the durations of steps.

LOOP = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2


def ran(*steps, committed=(), verified=0, limit=32):
    """Return a batch of sequence 1 that reports steps."""
    return batch_message(replace(progress_of({1: committed}, limit, verified), step_times=steps))


def teach(session, seconds_per_token):
    for index in range(300):
        tokens = 1 + index % 40
        send(session, batch=ran(StepTime(tokens, 1, 1 + seconds_per_token * tokens)))


def test_each_engine_of_a_namespace_has_a_curve_of_its_own(namespace):
    sessions = [Session(namespace, Limits()) for _ in range(2)]
    for session, seconds_per_token in zip(sessions, (0.001, 0.3), strict=True):
        send(session, starts=[start(1, LOOP)])
        teach(session, seconds_per_token)
    fast, slow = [drafted(send(session, batch=batch({1: ()}, 32))) for session in sessions]
    assert len(fast) > 2 * len(slow) > 0
    assert namespace.budget_totals.sizes[:, 0].sum() > 500
    sessions[0].close()
    sessions[1].close()
    assert namespace.budget_totals.sizes[:, 0].sum() > 500, "totals of engines that have left are kept"


def test_drafts_that_cost_more_than_they_save_are_paused(namespace):
    session = Session(namespace, Limits())
    send(session, starts=[start(1, LOOP)])
    pauses = []
    for _ in range(30):
        step = StepTime(2, 1, 0.01, drafting_s=0.02)
        response = send(session, batch=ran(step, committed=[50], limit=1))
        pauses.append(response.drafts.pause_steps)
    assert any(pauses)


def test_a_configured_cost_is_not_corrected():
    with still_namespace(replace(CONFIG, cost=0.02)) as namespace:
        session = Session(namespace, Limits())
        send(session, starts=[start(1, LOOP)])
        before = drafted(send(session, batch=batch({1: ()}, 32)))
        teach(session, 0.5)
        assert drafted(send(session, batch=batch({1: ()}, 32))) == before
