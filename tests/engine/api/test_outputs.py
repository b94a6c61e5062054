"""Compare released pieces with the complete text, cut where the engine would cut it."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from engine.api.outputs import OutputText

STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)
STEPS = st.lists(st.tuples(st.text("abc\n", min_size=1, max_size=5), st.integers(0, 5)), max_size=12)


class Letters:
    """One character per token; every other one is held back until the next, like half of a UTF-8 sequence."""

    def __init__(self):
        self._half = ""

    def feed(self, token):
        whole, self._half = (self._half + chr(token), "") if self._half else ("", chr(token))
        return whole

    def finish(self):
        return self._half


def engine_of(steps, stops, min_tokens):
    """Return each step's part of the output, and the text before the stop string that ended it, if any."""
    taken, text = [], ""
    for step, accepted in steps:
        kept = ""
        for letter in step:
            kept, text = kept + letter, text + letter
            ends = [stop for stop in stops if text.endswith(stop) and len(text) > min_tokens]
            if ends:
                return [*taken, (kept, accepted)], text.removesuffix(max(ends, key=len))
        taken.append((kept, accepted))
    return taken, None


@given(STEPS, STOPS, st.integers(0, 6))
@example([("ab", 0), ("ab", 0), ("b", 1)], ["abb"], 0)
@example([("abb", 2)], ["abb", "b"], 0)
@example([("ab", 0), ("cc", 0)], ["ab"], 2)
def test_pieces_add_up_to_the_text(steps, stops, min_tokens):
    taken, cut = engine_of(steps, stops, min_tokens)
    text = "".join(letters for letters, _ in taken) if cut is None else cut

    class Whole(Letters):
        def feed(self, token):
            return chr(token)

    output, pieces = OutputText(Whole(), stops), []
    for letters, accepted in taken:
        tokens = np.array([ord(letter) for letter in letters], np.uint32)
        pieces += output.feed(tokens, min(accepted, len(tokens)))
        # Released text is never changed later.
        assert text.startswith("".join(piece.text for piece in pieces))
    pieces += output.finish(cut)
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.text for piece in pieces)


@given(STEPS)
def test_without_stop_strings_complete_characters_are_released_at_once(steps):
    output = OutputText(Letters())
    fed = released = 0
    for text, accepted in steps:
        tokens = np.array([ord(letter) for letter in text], np.uint32)
        fed += len(text)
        released += sum(len(piece.text) for piece in output.feed(tokens, min(accepted, len(tokens))))
        assert released == fed // 2 * 2
    assert len("".join(piece.text for piece in output.finish(None))) == fed % 2


def test_pieces_are_marked_as_drafted_or_not():
    class Whole(Letters):
        def feed(self, token):
            return chr(token)

    output = OutputText(Whole(), ["zz"])
    assert output.feed(np.array([97, 98, 99], np.uint32), 2) == [("ab", True), ("c", False)]
    assert output.feed(np.array([122], np.uint32), 1) == []
    assert output.finish(None) == [("z", False)]
