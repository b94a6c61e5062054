"""Decide in which steps drafts are made, from what drafting costs and saves.

A step with drafts saves the time that steps without drafts would have taken for the tokens that it committed, less its
own time and that of drafting. The sum of what is saved is limited, so that drafting stops soon after it is no longer
worthwhile. It is tried again after a pause.

Trials are charged against a small fraction of the time: the allowance grows with every step, a loss reduces it, and a
trial begins when the allowance covers what it is expected to lose. The allowance does not start at 0, because a corpus
that is still empty will soon be useful. A first trial that is expected to lose more waits as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from math import ceil

MAX_LOSS = 0.01
"""Fraction of the time that drafting costs in the end while it is not worthwhile: the allowance that a step adds."""
TRIAL = 1.0
"""Time that a trial may lose before drafting stops."""
MIN_TRIAL_STEPS = 6
"""Smallest number of steps of a trial of one sequence: what a single step saves says little."""
MAX_SAVED, MAX_LOST = 5.0, 50.0
"""Largest sum of saved time, and of lost time, as multiples of the time that a trial may lose. The first limits how
much drafting loses after it stops being worthwhile, the second how much a very slow step counts."""
FIRST_ALLOWANCE = 2.0
"""First allowance, as a multiple of the time that a trial may lose. Saved time raises it by at most `MAX_SAVED`."""
MEASURED_RUNS = 4, 1024
"""The argument `runs` of a `Backoff` that inserts single steps without drafts, to measure their duration."""
RECENT = 5
"""Number of recent steps whose median counts."""
MAX_DRAFTING = 4.0
"""Largest time of drafting that counts, as a multiple of the median: new prompts make a drafter slower, but a call that
waited for something else says nothing about it."""


class Backoff:
    """Stops drafting while it is not worthwhile. All times are multiples of the duration of a step without drafts."""

    def __init__(
        self,
        trial: float = TRIAL,
        *,
        shortest_pause: int = 1,
        runs: tuple[int, int] | None = None,
        is_stopped: bool = False,
        min_trial_steps: int = MIN_TRIAL_STEPS,
    ) -> None:
        """trial: time that a trial may lose, in at least `min_trial_steps` steps. shortest_pause: smallest number of
        steps without drafts. runs: first and largest number of steps with drafts after which drafting stops, so that
        steps without drafts are measured; the number doubles each time. None: it does not stop for that. is_stopped:
        whether the first steps have no drafts.
        """
        self._trial, self._min_trial_steps, self._shortest_pause = trial, min_trial_steps, shortest_pause
        self._run_steps, self._most_run_steps = runs or (0, 0)
        self._sum = self._run = trial
        """Sums of saved time, limited as above: of all steps with drafts; of those since drafting last began, without
        the ones that were slow because it began."""
        self._allowance = FIRST_ALLOWANCE * trial
        """Time that drafting may lose now."""
        self._drafting, self._saved = deque[float](maxlen=RECENT), deque[float](maxlen=RECENT)
        """Time of drafting in recent steps with drafts, and the time that each of these saved."""
        self._uncounted = 0
        """Number of first steps whose drafting does not count yet, because the usual time is not known."""
        self.steps = 0
        """Number of steps since drafting last began or stopped."""
        self.pause_steps = shortest_pause if is_stopped else 0
        """Number of steps of the current pause; 0 while drafting is not stopped."""

    @property
    def is_stopped(self) -> bool:
        """Whether the next step has no drafts."""
        return self.pause_steps > 0

    def record_drafts(self, saved: float, drafting: float = 0.0, *, is_beginning: bool = False) -> None:
        """Record a step with drafts: the time that it saved, negative if it cost time, and that of drafting.

        The first calls count with the median of the first times, since they load modules or connect. is_beginning:
        whether the step took longer than later ones will, because drafting began again.
        """
        self._drafting.append(drafting)
        if len(self._drafting) > RECENT // 2:
            usual = _median(self._drafting)
            saved -= min(drafting, MAX_DRAFTING * usual) + self._uncounted * usual
            self._uncounted = 0
        else:
            self._uncounted += 1
        self._saved.append(saved)
        most, least = MAX_SAVED * self._trial, -MAX_LOST * self._trial
        self._sum = min(max(self._sum + saved, least), most)
        full = max(self._allowance, FIRST_ALLOWANCE * self._trial + most)
        self._allowance = min(max(self._allowance + saved + MAX_LOSS, least), full)
        if not is_beginning:
            self._run = min(self._run + saved, most)
        self.steps += 1
        if max(self._sum, self._run) < 0 and self.steps >= self._min_trial_steps:
            self.steps, self.pause_steps = 0, max(self._shortest_pause, self._missing_steps(-_median(self._saved)))
        elif self.steps == self._run_steps:
            self.steps, self.pause_steps = 0, self._shortest_pause
            self._run_steps = min(2 * self._run_steps, self._most_run_steps)

    def record_pause(self) -> None:
        """Record a step in which no drafts were made because drafting was stopped."""
        self.steps += 1
        if self.steps >= self.pause_steps:
            self.end_pause()

    def end_pause(self) -> None:
        """Draft again; if drafting was not worthwhile, as a new trial."""
        if max(self._sum, self._run) < 0:
            self._sum, self._run = max(self._sum, self._trial), self._trial
        self._allowance += MAX_LOSS * self.pause_steps
        self.steps = self.pause_steps = 0

    def delay_trial(self, loss: float) -> None:
        """Begin a pause if the next step begins a trial that is expected to lose more than the allowance.

        loss: expected loss of one of its steps; negative if drafting is expected to save time.
        """
        if self.steps == self.pause_steps == 0 and loss > 0:
            self.pause_steps = self._missing_steps(loss)

    def _missing_steps(self, loss: float) -> int:
        """Return the number of steps without drafts after which the allowance covers a trial, 0 if it does now.

        loss: expected loss of a step of the trial.
        """
        lost = max(self._trial, self._min_trial_steps * loss)
        return max(0, ceil((lost - self._allowance) / MAX_LOSS))


def _median(values: Collection[float]) -> float:
    """Return the median, of an even number the larger one of the two in the middle."""
    return sorted(values)[len(values) // 2]
