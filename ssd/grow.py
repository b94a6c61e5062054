"""Growing a draft from sampled occurrences: at every token the most frequent continuation, until the odds are poor."""

from __future__ import annotations

import numpy as np

from ssd.jit import Bool, Float, FloatsOut, Int, Tokens, TokensOut, inline, kernel
from ssd.ring import SEPARATOR

DOUBT_AGREED = 1.0
"""A continuation on which several occurrences agree is right half of the time after a match of this many tokens."""

DOUBT = 2.5
"""The same for one that was seen once, or that others contradict. Both fitted on six kinds of recorded traffic."""


@inline
def look_ahead(text, positions, count, depth, path, goes_on, ahead):  # type: ignore[no-untyped-def]
    """Write the token at `depth` behind each of `positions[:count]` into `ahead`.

    Behind the text's end comes `path` if the text goes on, else the separator.
    """
    for index in range(count):
        at = positions[index] + depth
        if at < len(text):
            ahead[index] = text[at]
        else:
            ahead[index] = path[at - len(text)] if goes_on else SEPARATOR


@inline
def most_frequent(ahead, positions, count):  # type: ignore[no-untyped-def]
    """The commonest of `ahead[:count]`, of equals the one with the most recent position.

    Returns (token, occurrences). The separator stands for the end of a request.
    """
    winner, winner_votes, winner_newest = SEPARATOR, 0, 0
    for index in range(count):
        token = ahead[index]
        votes, newest = 0, positions[index]
        for other in range(count):
            if ahead[other] == token:
                votes += 1
                newest = max(newest, positions[other])
        if votes > winner_votes or (votes == winner_votes and newest > winner_newest):
            winner, winner_votes, winner_newest = token, votes, newest
        if 2 * winner_votes > count:
            break
    return winner, winner_votes


@kernel(Tokens, TokensOut, Int, Int, Int, Float, Bool, TokensOut, FloatsOut, returns=Int)
def grow_path(text, positions, count, match_length, limit, min_path_odds, goes_on, tokens, odds):  # type: ignore[no-untyped-def]
    """Grow a path of at most `limit` tokens into `tokens` and `odds`; returns its length.

    text: uint32. positions[:count]: sampled occurrences of a match of `match_length` tokens; overwritten.
    goes_on: whether the draft continues this very text, so that an occurrence near its end continues into the draft
    itself, as the copies of Ziv and Lempel (1977) do; if not, the text's end is the end of a request.
    A token's odds are its share of the occurrences that agree with the path so far, times m / (m + doubt)
    for m tokens of match and path before it. The path ends where a request most often ended, or before its
    product of odds would fall below `min_path_odds`.
    """
    ahead = np.empty(count, np.uint32)  # looked up once a token, since the votes read it count^2 times
    path_odds = 1.0
    for depth in range(limit):
        look_ahead(text, positions, count, depth, tokens, goes_on, ahead)
        token, votes = most_frequent(ahead, positions, count)
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
            if ahead[index] == token:
                positions[agreeing] = positions[index]
                agreeing += 1
        count = agreeing
    return limit
