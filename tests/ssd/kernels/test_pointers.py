"""Pointers to copied text, compared with a slow reference, over steps and over the nodes of a draft."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ssd.corpus.view import RING_OLDEST
from ssd.kernels.candidates import DROPPED_MISSES
from ssd.kernels.pointers import CLEAR_MISSES_AFTER, POINTER_FROM
from ssd.kernels.probabilities import GLOBAL, LOCAL, SAMPLES
from ssd.sequences.tables import ABSENT, MISSES, NO_POINTER, POINTERS, RUNS
from tests import naive
from tests.replay import branches, drafter_of, progress_of
from tests.strategies import ALPHABETS, array, examples

DEPTH = 32
MAX_DRAFT = 12


@dataclass(frozen=True)
class Pointer:
    """The position of the next token in a text, or None; correct predictions in a row, and misses."""

    place: int | None = None
    run: int = 0
    missed: int = 0

    def after(self, text, token):
        """Return the pointer after a token was committed."""
        if self.place is None:
            return self
        predicted = text[self.place]
        run = self.run + 1 if predicted == token else 0
        missed = self.missed if predicted == token else self.missed + 1
        if run >= CLEAR_MISSES_AFTER:
            missed = 0
        if predicted == naive.SEPARATOR or missed > DROPPED_MISSES:
            return Pointer(None, run, missed)
        return Pointer(self.place + 1, run, missed)

    def moved(self, text, positions, context):
        """Return the pointer after a search for the end of a context: to the newest of the longest matches."""
        lengths = {
            position: naive.common_length(text, position, context, len(context), DEPTH) for position in positions
        }
        longest = max(lengths.values(), default=0)
        if longest < POINTER_FROM or (self.place is not None and longest <= self.run):
            return self
        found = [position for position, length in lengths.items() if length == longest]
        # Of more, only a sample is looked at.
        assume(len(found) <= SAMPLES)
        return Pointer(max(found), longest, 0)

    def on_path(self, text, path):
        """Return the correct predictions in a row and the misses at a node of a draft; None if nothing is predicted."""
        run, missed = self.run, self.missed
        if self.place is None:
            return None
        for depth, token in enumerate(path):
            predicted = ([*text, *path])[self.place + depth]
            if predicted == naive.SEPARATOR:
                return None
            run, missed = (run + 1, missed) if predicted == token else (0, missed + 1)
        return run, missed


def copies():
    """Generate requests, and a sequence's prompt and steps that copy parts of them, or of the prompt, with changes."""

    def over(alphabet):
        tokens = st.sampled_from(alphabet)
        requests = st.lists(st.lists(tokens, max_size=20), max_size=3)
        return requests.flatmap(lambda requests: st.tuples(st.just(requests), prompts(requests, tokens), steps(tokens)))

    def prompts(requests, tokens):
        # A repeated phrase sets a pointer so near to the end that it continues into the draft.
        repeated = st.lists(tokens, min_size=1, max_size=4).map(lambda phrase: phrase * 6)
        parts = [st.lists(tokens, max_size=8), repeated]
        parts += [st.just(request[:end]) for request in requests for end in (7, 12, len(request))]
        return st.lists(st.one_of(*parts), min_size=1, max_size=3).map(lambda parts: list(chain(*parts))[:40])

    def steps(tokens):
        # Numbers of tokens that continue the copy, each followed by any token.
        return st.lists(st.tuples(st.integers(0, 20), tokens), min_size=1, max_size=5)

    return st.one_of(ALPHABETS, st.just(list(range(50)))).flatmap(over)


def continued(text, pointers, own, count, token):
    """Return up to `count` tokens that the first valid pointer predicts, and a token."""
    for source, from_text in ((GLOBAL, text), (LOCAL, own)):
        if pointers[source].place is not None:
            copied = from_text[pointers[source].place :][:count]
            return [each for each in copied if each != naive.SEPARATOR] + [token]
    return [token]


@given(copies(), st.sampled_from(["path", "tree"]))
@example(([list(range(50))], list(range(8)), [(5, 60), (20, 60), (2, 61)]), "path")  # clears the misses
@example(([list(range(50))], list(range(8)), [(5, 60), (16, 60), (2, 61)]), "path")  # with the last token that it needs
@examples(200)
def test_pointers_and_their_predictions_on_a_draft_are_those_of_a_slow_reference(world, shape):
    requests, prompt, steps = world
    text, own, pointers = naive.concatenated(requests), list(prompt), {GLOBAL: Pointer(), LOCAL: Pointer()}
    with drafter_of(requests, draft_shape=shape, match_depth=DEPTH, max_draft=MAX_DRAFT) as drafter:
        drafter.start(1, array(prompt), learn=False)
        produced = []
        for count, token in steps:
            assume(len(own) + len(produced) <= 2 * DEPTH)
            drafts = drafter.draft(progress_of({1: produced}, MAX_DRAFT, cost=1e-6))
            for each in produced:
                pointers = {
                    source: pointer.after(text if source == GLOBAL else own, each)
                    for source, pointer in pointers.items()
                }
                own.append(each)
            pointers[GLOBAL] = pointers[GLOBAL].moved(text, naive.usable_positions(text), own)
            pointers[LOCAL] = pointers[LOCAL].moved(own, range(1, len(own)), own)
            assert pointers_of(drafter) == pointers
            paths = [[], *branches(drafts.tokens.tolist(), drafts.parents.tolist())]
            nodes = drafter._sequences.tables.nodes[0, : len(paths)]
            for source, from_text in ((GLOBAL, text), (LOCAL, own)):
                expected = [pointers[source].on_path(from_text, path) for path in paths] if own else []
                assert predictions_of(nodes, source)[: len(expected)] == expected
            produced = continued(text, pointers, own, count, token)


def pointers_of(drafter):
    state = drafter._sequences.state[0]
    found = {}
    for source in (GLOBAL, LOCAL):
        place, run, missed = state[POINTERS + 3 * source : POINTERS + 3 * source + 3].tolist()
        found[source] = Pointer(None if place == NO_POINTER else place, run, missed)
    return found


def predictions_of(nodes, source):
    return [
        None if missed == ABSENT else (run, missed)
        for run, missed in nodes[:, [RUNS + source, MISSES + source]].tolist()
    ]


def test_a_pointer_to_overwritten_text_is_dropped():
    copied, newer = np.arange(100, 160), np.arange(1000, 9000)
    with drafter_of([copied], capacity=4096) as drafter:
        drafter.start(1, array(copied[:20]), learn=False)
        assert drafter.draft(progress_of({1: []}, 4)).tokens.tolist() == copied[20:24].tolist()
        assert pointers_of(drafter)[GLOBAL].place == 20
        while drafter.corpus.view.arrays.ring[RING_OLDEST] < 70_000:
            drafter.corpus.append(array(newer))
            drafter.corpus.refresh()
        # The slots of the copied text contain another request now.
        assert drafter.draft(progress_of({1: copied[20:22]}, 4, cost=1e-6)).tokens.tolist() == []
        assert pointers_of(drafter)[GLOBAL].place is None


def test_no_pointer_is_set_to_a_running_request():
    output = list(range(100, 120))
    with drafter_of([list(range(50, 80))]) as drafter:
        drafter.start(1, array(output[:10]), learn=False)
        drafter.start(2, array([1, 2]))
        drafter.draft(progress_of({2: output}, 0))
        drafter.corpus.refresh()
        assert drafter.draft(progress_of({1: []}, 4)).tokens.tolist() == output[10:14]
        assert pointers_of(drafter)[GLOBAL] == Pointer()
