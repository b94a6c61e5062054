"""Slow, obvious versions of what the packages do fast. They are the specification: tests hold the fast ones to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

SEPARATOR = 0xFFFF_FFFF


def ring_text(requests: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """What a ring remembers after `requests`: the newest `capacity` tokens, a separator behind each request."""
    text: list[int] = []
    for request in requests:
        if request:
            text += [*request[-(capacity - 1) :], SEPARATOR]
    return text[-capacity:]


def key(text: Sequence[int], position: int, depth: int | None = None) -> list[int]:
    """The text before a position, read backwards, to a depth."""
    return list(reversed(text[:position]))[:depth]


def full_order(text: Sequence[int]) -> list[int]:
    """Positions that have a key and a continuation, by their keys."""
    usable = [position for position in range(1, len(text)) if text[position - 1] != SEPARATOR]
    return sorted(usable, key=lambda position: key(text, position))


def local_order(text: Sequence[int], depth: int) -> list[int]:
    """Positions 1 to the last by their keys to a depth, equal ones by age."""
    return sorted(range(1, len(text)), key=lambda position: (key(text, position, depth), position))


def longest_match(text: Sequence[int], context: Sequence[int], depth: int) -> tuple[set[int], int]:
    """Positions of `text` preceded by the longest possible run of the context's last tokens, and the run's length."""
    for length in range(min(depth, len(context)), 0, -1):
        run = list(context[len(context) - length :])
        found = {position for position in range(length, len(text)) if list(text[position - length : position]) == run}
        if found:
            return found, length
    return set(), 0


def grow_path(
    text: Sequence[int], positions: Sequence[int], match_length: int, limit: int, min_path_odds: float, goes_on: bool
) -> tuple[list[int], list[float]]:
    """The most frequent continuation, token by token, with its odds; of a text that goes on, into itself."""
    tokens: list[int] = []
    odds: list[float] = []
    path_odds = 1.0
    alive = list(positions)
    while len(tokens) < limit:
        known = [*text, *tokens] if goes_on else text
        following = {p: known[p + len(tokens)] if p + len(tokens) < len(known) else SEPARATOR for p in alive}
        votes = Counter(following.values())
        newest = {token: max(p for p in alive if following[p] == token) for token in votes}
        winner = max(votes, key=lambda token: (votes[token], newest[token]))
        agreed = len(alive) > 1 and votes[winner] == len(alive)
        matched = match_length + len(tokens)
        token_odds = votes[winner] / len(alive) * matched / (matched + (1.0 if agreed else 2.5))
        path_odds *= token_odds
        if winner == SEPARATOR or path_odds < min_path_odds:
            break
        tokens.append(winner)
        odds.append(token_odds)
        alive = [p for p in alive if following[p] == winner]
    return tokens, odds


def article_draft(text: Sequence[int], context: Sequence[int], limit: int) -> tuple[list[int], int]:
    """The article's draft, counting all matches, and the length of its match."""
    for length in range(min(10, len(context)), 0, -1):
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
