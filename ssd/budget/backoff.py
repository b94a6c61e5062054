"""Decide in which steps drafts are made, from what drafting costs and saves.

A step with drafts saves the time that steps without drafts would have taken for the tokens that it committed, less its
own time and that of drafting. The sum of what is saved is limited, so that drafting stops soon after it is no longer
worthwhile. It is tried again after a pause. For a drafter that learns, this is short at first, because a corpus that is
still empty will soon be useful, and doubles with each trial that does not succeed. In the end drafting costs a small
fraction of the time, whatever the drafter costs.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from statistics import median

MAX_LOSS = 0.01
"""Fraction of the time that drafting costs in the end while it is not worthwhile."""
TRIAL = 1.0
"""Time that a trial may lose before drafting stops."""
MIN_TRIAL_STEPS = 6
"""Smallest number of steps of a trial of one sequence: what a single step saves says little."""
MAX_SAVED, MAX_LOST = 5.0, 50.0
"""Largest sum of saved time, and of lost time, as multiples of the time that a trial may lose. The first limits how
much drafting loses after it stops being worthwhile, the second how much a very slow step counts."""
FIRST_PAUSE = 128.0
"""Number of steps of the first pause if a step with drafts loses as much time as a step without drafts takes. The pause
is in proportion to that loss."""
MAX_DOUBLINGS = 30
"""Number of times that a pause doubles; the loss of a trial limits it earlier."""
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
        learns: bool = True,
    ) -> None:
        """trial: time that a trial may lose, in at least `min_trial_steps` steps. shortest_pause: smallest number of
        steps without drafts. runs: first and largest number of steps with drafts after which drafting stops, so that
        steps without drafts are measured; the number doubles each time. None: it does not stop for that. is_stopped:
        whether the first steps have no drafts. learns: whether drafts improve with the number of tokens seen, so that
        first pauses are short.
        """
        self._trial, self._min_trial_steps, self._shortest_pause = trial, min_trial_steps, shortest_pause
        self._run_steps, self._most_run_steps = runs or (0, 0)
        self._learns = learns
        self._sum = self._run = trial
        """Sums of saved time, limited as above: of all steps with drafts; of those since drafting last began, without
        the ones that were slow because it began."""
        self._failures = 0
        """Number of pauses since drafting was last worthwhile."""
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
            usual = median(self._drafting)
            saved -= min(drafting, MAX_DRAFTING * usual) + self._uncounted * usual
            self._uncounted = 0
        else:
            self._uncounted += 1
        self._saved.append(saved)
        most = MAX_SAVED * self._trial
        self._sum = min(max(self._sum + saved, -MAX_LOST * self._trial), most)
        if not is_beginning:
            self._run = min(self._run + saved, most)
        if self._sum == most:
            self._failures = 0
        self.steps += 1
        if max(self._sum, self._run) < 0 and self.steps >= self._min_trial_steps:
            self._stop()
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
        self.steps = self.pause_steps = 0

    def _stop(self) -> None:
        """Begin a pause, so that this trial loses `MAX_LOSS` of the time; a shorter one after few failures, if the
        drafter learns.
        """
        steps = (self._trial - self._sum) / MAX_LOSS
        if self._learns and any(self._drafting) and (loss := -median(self._saved)) > 0:
            steps = min(steps, FIRST_PAUSE * loss * 2.0 ** min(self._failures, MAX_DOUBLINGS))
        self._failures += 1
        self.steps, self.pause_steps = 0, max(self._shortest_pause, ceil(steps))
