"""The sequences of an engine as a conformance run sees them, and the events that it plans for them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from ssd.corpus.ring import MAX_TOKEN_ID

MAX_DRAFT = 4
"""Maximum number of draft tokens; small, so that short outputs take enough steps."""
EVENT_AT = 2
"""Number of batches of a sequence before the event of its scenario."""


class Scenario(Enum):
    """Events that are planned for a sequence."""

    NONE = "no drafts"
    """Its output is what later runs of the prompt must produce."""
    RIGHT = "drafts that are the output, now and then with a wrong last token"
    WRONG = "drafts of wrong tokens"
    LATE = "a late answer"
    LOST = "a lost sequence"
    ERROR = "an error as the answer"
    BROKEN = "a broken stream"


EVENTS = {
    Scenario.LATE: "late answer",
    Scenario.LOST: "lost sequence",
    Scenario.ERROR: "error",
    Scenario.BROKEN: "broken stream",
}
"""Scenarios with an event, and the name of the check that tests what follows it."""


@dataclass(eq=False)
class Sequence:
    """A sequence of the engine."""

    sequence_id: int
    prompt: tuple[int, ...]
    """Hints and prompt."""
    request_id: str
    scenario: Scenario
    output: list[int] = field(default_factory=list)
    """Committed tokens."""
    draft: list[int] = field(default_factory=list)
    """The last draft."""
    batches: int = 0
    event: str | None = None
    """Name of the check that the sequence's next tokens are about."""
    shortfall: tuple[str, str] | None = None
    """The check that fails if the last tokens were not the end of the output, and the failure."""
    offered: int = 0
    """Number of draft tokens in all."""
    accepted: int = 0
    is_over: bool = False
    """Whether the engine has ended the sequence while the service did not have it."""

    @property
    def label(self) -> str:
        """Name of the sequence in failures."""
        return f"sequence {self.sequence_id}"


class Predictions:
    """The outputs of prompts that have run without drafts, and the scenarios that are still to come."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[int, ...], list[int]] = {}
        self._scenarios: deque[Scenario] = deque(scenario for scenario in Scenario if scenario is not Scenario.NONE)

    def assign(self, prompt: tuple[int, ...]) -> Scenario:
        """Return the scenario of a sequence that starts."""
        if prompt not in self._outputs:
            return Scenario.NONE
        return self._scenarios.popleft() if self._scenarios else Scenario.RIGHT

    def reschedule(self, scenario: Scenario) -> None:
        """Schedule a scenario again that a sequence was too short for."""
        self._scenarios.append(scenario)

    def record(self, sequence: Sequence) -> None:
        """Keep the output of a sequence that ran without drafts."""
        if sequence.output:
            self._outputs.setdefault(sequence.prompt, sequence.output)

    def after(self, prompt: tuple[int, ...], output: list[int]) -> list[int]:
        """Return the tokens that are expected after an output; none if it is not as before."""
        expected = self._outputs.get(prompt, [])
        return expected[len(output) :] if expected[: len(output)] == output else []

    def draft(self, sequence: Sequence, output: list[int], limit: int, vocab_size: int | None) -> list[int]:
        """Return the draft after an output that the scenario of a sequence plans; limit: its maximum length."""
        path = self.after(sequence.prompt, output)[: min(limit, MAX_DRAFT)]
        wrong = [(token + 1) % (vocab_size or MAX_TOKEN_ID) for token in path]
        if sequence.scenario is Scenario.WRONG:
            return wrong
        is_partly_wrong = sequence.scenario is Scenario.RIGHT and sequence.batches % 2 and len(path) > 1
        return [*path[:-1], wrong[-1]] if is_partly_wrong else path

    def difference(self, sequence: Sequence) -> int | None:
        """Return the index of the first token that differs from the output without drafts; None if there is none."""
        expected = self._outputs.get(sequence.prompt, [])
        pairs = enumerate(zip(expected, sequence.output, strict=False))
        return next((index for index, (one, other) in pairs if one != other), None)
