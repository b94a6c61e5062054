"""Slow, obvious versions of what the packages do fast. They are the specification: tests hold the fast ones to them."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

SEPARATOR = 0xFFFF_FFFF


def joined(requests: Sequence[Sequence[int]]) -> list[int]:
    """Requests in a row, a separator behind each that is not empty."""
    return [token for request in requests if request for token in (*request, SEPARATOR)]


def key(text: Sequence[int], position: int, depth: int) -> list[int]:
    """The text before a position, read backwards: to a depth, or up to and with the separator before its request."""
    tokens: list[int] = []
    while len(tokens) < depth and SEPARATOR not in tokens:
        before = position - 1 - len(tokens)
        tokens.append(text[before] if before >= 0 else SEPARATOR)
    return tokens


def common_length(text: Sequence[int], position: int, other_text: Sequence[int], other: int, depth: int) -> int:
    """How many tokens before two positions are the same, read backwards; no separator is the same as another."""
    pairs = zip(key(text, position, depth), key(other_text, other, depth), strict=False)
    length = 0
    for one, another in pairs:
        if one != another or one == SEPARATOR:
            break
        length += 1
    return length


def usable_positions(text: Sequence[int]) -> list[int]:
    """Positions behind a token and before something: where a context can be matched and go on."""
    return [position for position in range(1, len(text)) if text[position - 1] != SEPARATOR]


def place_of(text: Sequence[int], order: Sequence[int], other_text: Sequence[int], other: int, depth: int) -> int:
    """Where a position of another text belongs in a sorted order: behind all keys that are not greater."""
    return bisect_right(order, key(other_text, other, depth), key=lambda position: key(text, position, depth))


def merged(
    order: Sequence[int], added: Sequence[int], places: Sequence[int], oldest: int, alive: int, slots: int
) -> list[int]:
    """`added` put into `order` at their places, without those outside the `alive` slots from `oldest` on."""
    everything = [*order]
    for place, position in reversed(list(zip(places, added, strict=True))):
        everything.insert(place, position)
    return [position for position in everything if (position - oldest) % slots < alive]


def levels(
    tiers: Sequence[tuple[Sequence[int], Iterable[int]]],
    context: Sequence[int],
    depth: int,
    *,
    rounds: int,
    growth: int,
    most: int,
) -> list[tuple[int, list[tuple[int, int]]]]:
    """Matches of a context in several texts, longest first: (tokens matched, [(text, position)]).

    tiers: a text each, and the positions of it that count. A shorter match is taken only if it has `growth` times the
    occurrences of the one taken before it; `rounds` lengths are looked at, and `most` taken.
    """
    lengths = {
        (tier, position): common_length(text, position, context, len(context), depth)
        for tier, (text, positions) in enumerate(tiers)
        for position in positions
    }
    taken: list[tuple[int, list[tuple[int, int]]]] = []
    for length in sorted({*lengths.values()} - {0}, reverse=True)[:rounds]:
        found = sorted(place for place, common in lengths.items() if common >= length)
        if not taken or len(found) >= growth * len(taken[-1][1]):
            taken.append((length, found))
    return taken[:most]


def transitions(texts: Iterable[Sequence[int]]) -> Mapping[int, set[int]]:
    """Which tokens follow which, in any of the texts."""
    following: dict[int, set[int]] = {}
    for text in texts:
        for token, successor in itertools.pairwise(text):
            following.setdefault(int(token), set()).add(int(successor))
    return following


def classic_draft(text: Sequence[int], context: Sequence[int], limit: int, longest: int = 10) -> tuple[list[int], int]:
    """Return the baseline's draft, counting all matches, and the length of its match."""
    for length in range(min(longest, len(context)), 0, -1):
        pattern = list(context[len(context) - length :])
        starts = [p for p in range(len(text) - length + 1) if list(text[p : p + length]) == pattern]
        if starts:
            continuations = {start: _continuation(text, start + length, limit) for start in starts}
            votes = Counter(continuations.values())
            newest = {c: max(s for s in starts if continuations[s] == c) for c in votes}
            return list(max(votes, key=lambda c: (votes[c], newest[c]))), length
    return [], 0


def _continuation(text: Sequence[int], start: int, limit: int) -> tuple[int, ...]:
    tokens: list[int] = []
    for token in text[start : start + limit]:
        if token == SEPARATOR:
            break
        tokens.append(token)
    return tuple(tokens)


def ngram_draft(text: Sequence[int], limit: int, longest: int = 4, shortest: int = 2) -> list[int]:
    """Prompt lookup: what followed the most recent earlier occurrence of the longest run that the text ends with."""
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        run = list(text[len(text) - length :])
        for start in range(len(text) - length - 1, -1, -1):
            if list(text[start : start + length]) == run:
                return list(text[start + length : start + length + limit])
    return []


def accepted_length(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """Leading draft tokens that the target would have produced itself."""
    accepted = 0
    while accepted < len(draft) and draft[accepted] == chosen[accepted]:
        accepted += 1
    return accepted


def accepted_path(draft: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The nodes of a draft tree that the target agrees with, walking down from the context."""
    path: list[int] = []
    while True:
        at = path[-1] if path else -1
        right = [node for node, parent in enumerate(parents) if parent == at and draft[node] == chosen[at + 1]]
        if not right:
            return path
        path.append(right[0])
