"""Slow reference versions of fast functions. They are the specification that tests compare the fast ones with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

SEPARATOR = 0xFFFF_FFFF


def concatenated(requests: Sequence[Sequence[int]]) -> list[int]:
    """Return all non-empty requests in one list, with a separator after each."""
    return [token for request in requests if request for token in (*request, SEPARATOR)]


def key(text: Sequence[int], position: int, depth: int) -> list[int]:
    """Return the text before a position, read backwards: `depth` tokens, or up to and including a separator."""
    tokens: list[int] = []
    while len(tokens) < depth and SEPARATOR not in tokens:
        before = position - 1 - len(tokens)
        tokens.append(text[before] if before >= 0 else SEPARATOR)
    return tokens


def common_length(text: Sequence[int], position: int, other_text: Sequence[int], other: int, depth: int) -> int:
    """Return how many tokens before two positions are equal, read backwards; separators are never equal."""
    pairs = zip(key(text, position, depth), key(other_text, other, depth), strict=False)
    length = 0
    for one, another in pairs:
        if one != another or one == SEPARATOR:
            break
        length += 1
    return length


def usable_positions(text: Sequence[int]) -> list[int]:
    """Return the positions that follow a token and are followed by something."""
    return [position for position in range(1, len(text)) if text[position - 1] != SEPARATOR]


def merged(
    order: Sequence[int], added: Sequence[int], places: Sequence[int], oldest: int, alive: int, slots: int
) -> list[int]:
    """Insert `added` into `order` at their places, without positions outside the `alive` slots from `oldest` on."""
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
    """Return the matches of a context in several texts, longest first: (tokens matched, [(text, position)]).

    tiers: pairs of a text and its indexed positions. A shorter match is used only if it has `growth` times the
    occurrences of the previously used one; `rounds` lengths are tried, and at most `most` are used.
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
    """Return the tokens after the most recent earlier occurrence of the longest suffix of the text (prompt lookup)."""
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        run = list(text[len(text) - length :])
        for start in range(len(text) - length - 1, -1, -1):
            if list(text[start : start + length]) == run:
                return list(text[start + length : start + length + limit])
    return []


def accepted_length(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """Return the number of leading draft tokens that equal the target's."""
    accepted = 0
    while accepted < len(draft) and draft[accepted] == chosen[accepted]:
        accepted += 1
    return accepted


def accepted_path(draft: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Return the nodes of a draft tree on the path that the target accepts."""
    path: list[int] = []
    while True:
        at = path[-1] if path else -1
        right = [node for node, parent in enumerate(parents) if parent == at and draft[node] == chosen[at + 1]]
        if not right:
            return path
        path.append(right[0])
