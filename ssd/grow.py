"""Growing a draft from sampled occurrences: at every token the most frequent continuation, until the odds are poor."""

from __future__ import annotations

from ssd.jit import Float, FloatsOut, Int, Tokens, TokensOut, inline, kernel
from ssd.ring import SEPARATOR

DOUBT_AGREED = 1.0
"""A continuation on which several occurrences agree is right half of the time after a match of this many tokens."""

DOUBT = 2.5
"""The same for one that was seen once, or that others contradict. Both fitted on six kinds of recorded traffic."""


@inline
def most_frequent(text, size, positions, count, ahead):  # type: ignore[no-untyped-def]
    """The commonest token `ahead` of `positions[:count]`, of equals the one with the most recent occurrence.

    Returns (token, occurrences). The separator stands for the end of a request, and the text's end counts as one.
    """
    winner, winner_votes, winner_newest = SEPARATOR, 0, 0
    for index in range(count):
        at = positions[index] + ahead
        token = text[at] if at < size else SEPARATOR
        votes, newest = 0, positions[index]
        for other in range(count):
            other_at = positions[other] + ahead
            other_token = text[other_at] if other_at < size else SEPARATOR
            if other_token == token:
                votes += 1
                newest = max(newest, positions[other])
        if votes > winner_votes or (votes == winner_votes and newest > winner_newest):
            winner, winner_votes, winner_newest = token, votes, newest
        if 2 * winner_votes > count:
            break
    return winner, winner_votes


@kernel(Tokens, TokensOut, Int, Int, Int, Float, TokensOut, FloatsOut, returns=Int)
def grow_path(text, positions, count, match_length, limit, min_path_odds, tokens, odds):  # type: ignore[no-untyped-def]
    """Grow a path of at most `limit` tokens into `tokens` and `odds`; returns its length.

    text: uint32. positions[:count]: sampled occurrences of a match of `match_length` tokens; overwritten.
    A token's odds are its share of the occurrences that agree with the path so far, times m / (m + doubt)
    for m tokens of match and path before it. The path ends where a request most often ended, or before its
    product of odds would fall below `min_path_odds`.
    """
    path_odds = 1.0
    for depth in range(limit):
        token, votes = most_frequent(text, len(text), positions, count, depth)
        matched = match_length + depth
        doubt = DOUBT_AGREED if 1 < count == votes else DOUBT
        token_odds = votes / count * (matched / (matched + doubt))
        path_odds *= token_odds
        if token == SEPARATOR or path_odds < min_path_odds:
            return depth
        tokens[depth] = token
        odds[depth] = token_odds
        agreeing = 0
        for index in range(count):
            at = positions[index] + depth
            if at < len(text) and text[at] == token:
                positions[agreeing] = positions[index]
                agreeing += 1
        count = agreeing
    return limit
