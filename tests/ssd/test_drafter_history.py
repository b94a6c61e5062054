"""A drafter through random histories of requests and sessions: what it remembers, counts, and may draft for others.

Each request has tokens of its own beside common ones, so that a draft shows whose text it is from.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from ssd import ClassicDrafter, DrafterConfig, SuffixDrafter
from ssd.corpus.corpus import Corpus
from ssd.types import ROOT
from tests import naive
from tests.replay import progress_of
from tests.ssd.corpora import DEPTH, text_of
from tests.strategies import array, assert_covered, examples

COMMON = [1, 2, 3]
IDLE_SESSIONS, IDLE_TOKENS = 2, 30


@dataclass(eq=False)
class Turn:
    """A running request."""

    text: list[int]
    given: int
    """Number of tokens that it began with."""
    first_learned: int
    session: str | None
    name: str | None
    turns: set[str | None]
    learn: bool
    is_kept: bool = True
    draft: tuple[list[int], list[int]] = field(default=([], []))


@dataclass(eq=False)
class Remembered:
    """A finished request."""

    tokens: list[int]
    name: str | None
    time: float


def common_start(one, other):
    """Return the number of leading tokens that two texts have in common."""
    pairs = zip(one, other, strict=False)
    return next((at for at, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(one), len(other)))


class History:
    """A drafter, and what it should remember, count and show."""

    EVENTS = ("start",) * 5 + ("step",) * 7 + ("finish",) * 3 + ("forget", "forget_older_than") * 2 + ("refresh",) * 4

    def __init__(self, seed, kind):
        self.rng, self.now = np.random.default_rng(seed), 1000.0
        self.learned = int(self.rng.choice([0, 5, 1 << 20]))
        config = DrafterConfig(
            match_depth=DEPTH, learned_prompt_tokens=self.learned, idle_sessions=IDLE_SESSIONS, idle_tokens=IDLE_TOKENS,
            draft_shape=str(self.rng.choice(["path", "tree"])), cost=1e-4, max_draft=8,
        )  # fmt: skip
        self.drafter = kind(config, corpus=Corpus(5000, DEPTH, lambda: self.now))
        self.corpus = self.drafter.corpus
        self.running, self.idle, self.last, self.remembered, self.started = {}, OrderedDict(), {}, [], 0
        self.visible = set()
        """Tokens that drafts of any request may have."""
        self.totals, self.seen = np.zeros(4, int), Counter()

    def run(self, steps=80):
        for _ in range(steps):
            getattr(self, str(self.rng.choice(self.EVENTS)))()
            self.now += int(self.rng.integers(3))
        self.drafter.close()
        self.running.clear()
        self.refresh()
        return self.seen

    def tokens(self, sequence_id, most=6):
        own = [1000 + sequence_id, 2000 + sequence_id]
        return self.rng.choice(COMMON + own, self.rng.integers(most + 1)).tolist()

    def start(self):
        if len(self.running) == 4:
            return
        number, self.started, rng = self.started, self.started + 1, self.rng
        session, name = rng.choice([None, "s", "t", "u"]), rng.choice([None, "a", "b"])
        learn, has_hints = bool(rng.random() < 0.7), bool(rng.random() < 0.3)
        idle, turns, _ = self.idle.pop(session, ([], set(), 0.0)) if session else ([], set(), 0.0)
        self.seen["turn"] += len(idle) > 0
        last = self.last.get(session, [])  # Although the drafter may not keep its index any more.
        prompt = [*last[: int(rng.choice([0.0, 0.7, 1.0, 1.0]) * len(last))], *self.tokens(number)]
        hints, committed = self.tokens(number) if has_hints else [], self.tokens(number, 3)
        self.drafter.start(
            number, array(prompt), hints=array(hints) if has_hints else None, committed=array(committed),
            session_id=session, request_id=name, learn=learn,
        )  # fmt: skip
        text = hints + prompt
        first = max(len(hints), len(text) - self.learned, common_start(idle, text))
        given = len(text) + len(committed)
        self.running[number] = Turn(text + committed, given, first, session, name, {*turns, name}, learn)

    def step(self):
        chosen = {number: turn for number, turn in self.running.items() if self.rng.random() < 0.7}
        runs = {number: self.produce(number, turn) for number, turn in chosen.items()}
        progress = progress_of({number: tokens for number, (tokens, _) in runs.items()}, int(self.rng.integers(9)))
        verified = array([count for _, count in runs.values()])
        expected = {
            number: self.drafter.running.accepted(number, array(tokens), count)
            for number, (tokens, count) in runs.items()
        }
        drafts = self.drafter.draft(replace(progress, verified=verified))
        for number, turn in chosen.items():
            assert self.commit(turn, *runs[number]) == expected[number]
        for index, turn in enumerate(chosen.values()):
            turn.draft = drafts.tokens_of(index).tolist(), drafts.parents_of(index).tolist()
            assert {*turn.draft[0]} <= {*turn.text} | self.visible
            self.seen["of others"] += len({*turn.draft[0]} - {*turn.text, *COMMON})
        self.check_totals()

    def produce(self, number, turn):
        """Return tokens of the target, and how many of the draft it verified."""
        followed = turn.draft[0][: self.rng.integers(4)]
        return followed + self.tokens(number), int(self.rng.integers(len(turn.draft[0]) + 1))

    def commit(self, turn, tokens, verified):
        """Add tokens of the target to a request; return how many of them are a path of the verified draft."""
        children = {pair: node for node, pair in enumerate(zip(*(part[:verified] for part in turn.draft), strict=True))}
        node, accepted = ROOT, 0
        for token in tokens:
            if (node := children.get((token, node))) is None:
                break
            accepted += 1
        self.totals += [1, len(tokens), verified, accepted] if tokens else 0
        turn.text += tokens
        if turn.learn:
            self.visible |= {*turn.text[turn.given :]}
        return accepted

    def check_totals(self):
        stats = self.drafter.stats
        assert [stats.steps, stats.committed, stats.verified, stats.accepted] == self.totals.tolist()

    def finish(self):
        if not self.running:
            return
        number, learn = int(self.rng.choice([*self.running])), bool(self.rng.random() < 0.7)
        turn = self.running.pop(number)
        tokens, verified = self.produce(number, turn)
        self.drafter.finish(number, array(tokens), verified=verified, learn=learn)
        self.commit(turn, tokens, verified)
        self.check_totals()
        if learn and turn.learn:
            self.remembered.append(Remembered(turn.text[turn.first_learned :], turn.name, self.now))
        if turn.session:
            self.last[turn.session] = turn.text
        if turn.session and turn.is_kept:
            self.idle.pop(turn.session, None)
            self.idle[turn.session] = turn.text, turn.turns, self.now
            while len(self.idle) > IDLE_SESSIONS or sum(len(text) for text, *_ in self.idle.values()) > IDLE_TOKENS:
                self.idle.popitem(last=False)

    def forget(self):
        name = str(self.rng.choice(["a", "b"]))
        self.drafter.forget(name)
        self.remembered = [each for each in self.remembered if each.name != name]
        self.keep_sessions(lambda turns, _: name not in turns)
        for turn in self.running.values():
            turn.is_kept &= name not in turn.turns
            turn.learn &= turn.name != name

    def forget_older_than(self):
        age = int(self.rng.integers(60))
        self.drafter.forget_older_than(age)
        self.remembered = [each for each in self.remembered if each.time >= self.now - age]
        self.keep_sessions(lambda _, since: since >= self.now - age)

    def keep_sessions(self, is_kept):
        self.idle = OrderedDict((name, each) for name, each in self.idle.items() if is_kept(*each[1:]))

    def refresh(self):
        self.corpus.refresh()
        self.seen["remembered"] += len(self.remembered)
        running = [turn for turn in self.running.values() if turn.learn]
        self.visible = {token for each in self.remembered for token in each.tokens}
        self.visible |= {token for turn in running for token in turn.text[turn.given :]}
        text, runs = text_of(self.corpus), [[]]
        for token in text.tolist():
            runs[-1].append(token) if token != naive.SEPARATOR else runs.append([])
        assert [run for run in runs if run] == [each.tokens for each in self.remembered if each.tokens]
        slots = self.corpus.fallback.arrays.slots
        assert {*slots[slots[:, 1] > 0, 0].tolist()} <= self.visible


@pytest.mark.parametrize("kind", [SuffixDrafter, ClassicDrafter])
def test_drafters_remember_and_show_what_they_should(kind):
    seen = sum((History(seed, kind).run() for seed in range(examples(50).max_examples)), Counter())
    assert_covered(seen, ("turn", "of others", "remembered"), 50)
