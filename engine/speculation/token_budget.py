"""Which drafted tokens a step verifies: those that pay.

A step of N tokens takes t(N) seconds: measured at some sizes when the engine starts, corrected while it runs. Draft
tokens are worth what they are likely to save: B sequences get B tokens a step, and one more for each draft token that
is accepted. So of all tokens that were drafted for a batch the likeliest m are verified, where
(B + their odds) / t(N + m) is largest. With m = 0 among the choices nothing is verified that does not pay.

Asking takes time as well. While accepted tokens save less than that, the drafter is asked in every second step, then in
every fourth, eighth and sixteenth, and hears of what was produced in between when it is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np

from ssd.types import DraftBatch

REPEATS = 3
"""Of each size; the least counts, since only other work makes a step slower."""
MEASURING_S = 3.0
"""Larger sizes are left to the last slope once measuring has taken so long."""
LEARNING_RATE = 0.05
"""Weight of a new step in the correction of its size."""
SHARED = 0.8
"""How much of that corrects all sizes: what slowed the machine down while it was measured slowed down all of them."""
TRIAL_RATE = 0.5
"""Of a step that was made to time its size, and which corrects that size alone."""
MOST_DEVIATION = 4.0
"""A step that takes so many times what was expected was disturbed, and corrects no more than this."""
SEVERAL = 16
"""Sequences in the step that tells what each takes beside its tokens."""
LEAST_COST = 1e-4
MEMORY = 0.98
"""What is left of a step's outcome after the next, when drafts are judged: about fifty steps count."""
BENEFIT_OF_DOUBT = 0.5
"""Accepted tokens that every drafter begins with, and comes back to while nothing of it is verified. With that memory a
drafter of which nothing is ever accepted gets so many tokens in fifty steps that they cost a hundredth of the time."""
STEPS_TO_TRIAL = 20
"""Steps without a draft, though some were likely, before the likeliest is verified all the same: its size is never
timed again otherwise."""
LEAST_TRIAL = 2.0
"""Tokens that such a draft must be likely to gain."""
NOTED_EVERY = 8
"""Of steps in which the drafter is not asked, so many for one that corrects the price: that takes time, too."""
MOST_REST = 15
"""Steps in a row in which a drafter is not asked: what useless drafts cost is a sixteenth of asking."""
RECENT = 0.9
"""What is left of an asking's outcome after the next, when it is judged whether asking pays: about ten count."""


class Cost(Protocol):
    """What steps take."""

    def seconds(self, tokens: np.ndarray | int, sequences: int) -> np.ndarray:
        """See `StepCost.seconds`."""
        ...

    def note(self, tokens: int, sequences: int, seconds: float, *, is_trial: bool = False) -> None:
        """See `StepCost.note`."""
        ...

    def of_one_more(self, tokens: int, sequences: int) -> float:
        """See `StepCost.of_one_more`."""
        ...


class StepCost:
    """Seconds that a step takes, by its tokens and sequences; between the sizes that were measured a straight line."""

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float], per_sequence: float = 0.0) -> None:
        """sizes: rising numbers of tokens. seconds: of a step of so many tokens of one sequence. per_sequence: that
        each sequence more takes beside its tokens.
        """
        self._sizes = np.array(sizes, np.float64)
        # More tokens never take less: what seems to was disturbed.
        self._seconds = np.maximum.accumulate(np.array(seconds, np.float64))
        self._per_sequence = max(0.0, per_sequence)

    @classmethod
    def measured(cls, run: Callable[[int, int], object], wanted: Sequence[int], sequences: int = 1) -> StepCost:
        """Time `run`, which makes a step of so many tokens of each of so many sequences, at the sizes `wanted`, which
        rise. What a sequence takes beside its tokens is told by a step of a token of each of `sequences`.
        """
        run(wanted[0], 1)  # The first call allocates and compiles.
        sizes: list[int] = []
        seconds: list[float] = []
        began = perf_counter()
        while len(sizes) < len(wanted) and (len(sizes) < 2 or perf_counter() - began < MEASURING_S):
            sizes.append(wanted[len(sizes)])
            seconds.append(_least_seconds(run, sizes[-1], 1))
        several = min(sequences, SEVERAL)
        alone = float(cls(sizes, seconds).seconds(several, 1))
        more = (_least_seconds(run, 1, several) - alone) / (several - 1) if several > 1 else 0.0
        return cls(sizes, seconds, more)

    def seconds(self, tokens: np.ndarray | int, sequences: int) -> np.ndarray:
        """Of steps of so many tokens, float64 like `tokens`."""
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._sizes[-1] - self._sizes[-2])
        beyond = np.maximum(0, np.asarray(tokens, np.float64) - self._sizes[-1]) * slope
        return np.interp(tokens, self._sizes, self._seconds) + beyond + self._per_sequence * (sequences - 1)

    def note(self, tokens: int, sequences: int, seconds: float, *, is_trial: bool = False) -> None:
        """Such a step took so long. `is_trial`: it was made to find that out, as its size does not occur otherwise."""
        expected = float(self.seconds(tokens, sequences))
        factor = min(max(seconds / expected, 1 / MOST_DEVIATION), MOST_DEVIATION)
        nearness = np.exp(-np.abs(np.log(self._sizes / max(1, tokens))))
        weights = TRIAL_RATE * nearness if is_trial else LEARNING_RATE * (SHARED + (1 - SHARED) * nearness)
        self._seconds = np.maximum.accumulate(self._seconds * factor**weights)

    def of_one_more(self, tokens: int, sequences: int) -> float:
        """What one more token costs beside `tokens`, as a part of a step of one of `sequences`, above 0 to 1.

        In the time of a step all sequences together get a token each, so a token has to earn so many times its time.
        """
        now, more = self.seconds(np.array([tokens, tokens + sequences]), sequences)
        return float(min(1.0, max(LEAST_COST, (more - now) / now)))


class Spent(NamedTuple):
    """What a step verifies."""

    lengths: np.ndarray
    """int64 [B]: tokens of each draft."""
    is_trial: bool = False
    """Whether nothing seemed to pay, and one is verified only to time it."""


class Asking(NamedTuple):
    """How a step came by its drafts."""

    seconds: float
    """That it took longer as the drafter was asked."""
    is_trial: bool = False
    """See `Spent.is_trial`."""


class Budget:
    """Spends the tokens of each step where they are likeliest to be accepted."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._promised = self._kept = 0.0
        """Tokens that were to be accepted, by their odds, and that were."""
        self._steps_without = 0
        """In which likely drafts were not verified."""
        self._unnoted = 0
        """Steps in a row that corrected no price."""
        self._spent = self._saved = 0.0
        """Seconds that asking took lately, and that accepted tokens saved."""
        self._rest = self._steps_to_rest = 0
        """After the next asking that does not pay, and from now on."""

    @property
    def rests(self) -> bool:
        """Whether the drafter is not to be asked in the next step."""
        return self._steps_to_rest > 0

    @property
    def trust(self) -> float:
        """How much of what the drafter promised lately was kept."""
        return min(1.0, (self._kept + BENEFIT_OF_DOUBT) / (self._promised + BENEFIT_OF_DOUBT))

    def price(self, tokens: int, sequences: int) -> float:
        """See `StepCost.of_one_more`."""
        return self._cost.of_one_more(tokens, sequences)

    def spend(self, drafts: DraftBatch, usable: np.ndarray, tokens: int) -> Spent:
        """How many tokens of each draft to verify beside `tokens`; drafters put the likeliest first.

        usable: int64 [B], how many of each may be.
        """
        sequences = len(drafts.offsets) - 1
        odds = path_odds(drafts.accept_prob, drafts.parents, drafts.offsets)
        starts, sizes = drafts.offsets[:-1].astype(np.int64), np.diff(drafts.offsets)
        places = np.arange(len(odds)) - starts.repeat(sizes)
        odds[places >= usable.repeat(sizes)] = 0
        likely = odds * self.trust
        lengths = worth_verifying(likely, drafts.offsets, tokens, sequences, self._cost)
        is_trial = False
        if np.count_nonzero(lengths) == 0 and len(odds):
            gains = np.bincount(np.arange(sequences).repeat(sizes), likely, sequences)
            is_trial = self._try_likeliest(lengths, usable, gains)
        self._promised += float(odds[places < lengths.repeat(sizes)].sum())
        return Spent(lengths, is_trial)

    def _try_likeliest(self, lengths: np.ndarray, usable: np.ndarray, gains: np.ndarray) -> bool:
        """Nothing seems to pay. If that has long been so, verify the draft that may gain most; returns whether."""
        best = int(gains.argmax())
        if gains[best] < LEAST_TRIAL:
            return False
        self._steps_without += 1
        if self._steps_without < STEPS_TO_TRIAL:
            return False
        lengths[best] = usable[best]
        self._steps_without = 0
        return True

    def note(
        self, tokens: int, sequences: int, accepted: int, seconds: float, asking: Asking | None, foreign: int = 0
    ) -> None:
        """A step took so long, and so many draft tokens were accepted, of which some were none of the drafter's.

        asking: None if the drafter was not asked.
        """
        # By steps, not by askings: what was of no use long ago says little.
        self._promised *= MEMORY
        self._kept = MEMORY * (self._kept + accepted)
        self._unnoted += 1
        if asking is not None or self._unnoted == NOTED_EVERY:
            self._cost.note(tokens, sequences, seconds, is_trial=asking is not None and asking.is_trial)
            self._unnoted = 0
        self._steps_to_rest = max(0, self._steps_to_rest - 1)
        if asking is None:
            return
        self._spent = RECENT * self._spent + asking.seconds
        self._saved = RECENT * self._saved + (accepted - foreign) * seconds / (sequences + accepted)
        self._rest = 0 if self._saved >= self._spent else min(2 * self._rest + 1, MOST_REST)
        self._steps_to_rest = self._rest


def worth_verifying(odds: np.ndarray, offsets: np.ndarray, tokens: int, sequences: int, cost: Cost) -> np.ndarray:
    """How many tokens of each sequence's draft to verify, int64 [B].

    odds: float [T], of each drafted token to be accepted together with its ancestors, falling within each draft.
    offsets: int [B + 1], into `odds`. tokens: of the step without drafts. sequences: that get a token in it.
    """
    lengths = np.diff(offsets).astype(np.int64)
    if len(odds) == 0:
        return lengths
    order = np.argsort(-odds, kind="stable")
    gained = sequences + np.concatenate(([0.0], np.cumsum(odds[order], dtype=np.float64)))
    rate = gained / cost.seconds(tokens + np.arange(len(odds) + 1), sequences)
    chosen = np.zeros(len(odds), np.bool_)
    chosen[order[: int(rate.argmax())]] = True
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return np.bincount(owner, weights=chosen, minlength=len(lengths)).astype(np.int64)


def path_odds(odds: np.ndarray, parents: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Odds of each token together with all its ancestors, float64 [T].

    odds: float [T], of single tokens given their parents. parents and offsets as in `DraftBatch`.
    """
    starts = np.repeat(np.asarray(offsets[:-1], np.int64), np.diff(offsets).astype(np.int64))
    nobody = len(odds)
    ancestor = np.append(np.where(parents < 0, nobody, parents + starts), nobody)
    logs = np.append(np.log(np.maximum(np.asarray(odds, np.float64), 1e-30)), 0.0)
    # Each round knows twice as many ancestors.
    while np.count_nonzero(ancestor < nobody):
        logs, ancestor = logs + logs[ancestor], ancestor[ancestor]
    return np.exp(logs[:nobody])


def _least_seconds(run: Callable[[int, int], object], tokens: int, sequences: int) -> float:
    least = float("inf")
    for _ in range(REPEATS):
        began = perf_counter()
        run(tokens, sequences)
        least = min(least, perf_counter() - began)
    return least
