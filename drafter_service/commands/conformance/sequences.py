"""The sequences of an engine as a conformance run sees them: planned drafts and events, and rules for their text."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from drafter_service.commands.conformance.checks import Checks
from ssd.corpus.ring import MAX_TOKEN_ID

MAX_DRAFT = 4
"""Maximum number of draft tokens; small, so that short outputs take enough steps."""
EVENT_AT = 2
"""Number of batches of a sequence before the event of its scenario."""


class Scenario(Enum):
    """Plan for a sequence: its drafts or, for the last four, an event. The value is the check of what follows it."""

    NONE = ""
    """No drafts: its output is what later runs of the prompt must produce."""
    RIGHT = "drafts used"
    """The output, now and then with a wrong last token."""
    WRONG = "output"
    """Wrong tokens."""
    LATE = "late answer"
    LOST = "lost sequence"
    ERROR = "error"
    BROKEN = "broken stream"


EVENTS = (Scenario.LATE, Scenario.LOST, Scenario.ERROR, Scenario.BROKEN)


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
    had_draft: bool = False
    """Whether any of its drafts had tokens."""
    batches: int = 0
    event: str | None = None
    """Name of the check that the sequence's next tokens are about."""
    shortfall: tuple[str, str] | None = None
    """The check that fails if the last tokens were not the end of the output, and the failure."""
    is_over: bool = False
    """Whether the engine has ended the sequence while the service did not have it."""

    @property
    def label(self) -> str:
        """Name of the sequence in failures."""
        return f"sequence {self.sequence_id}"


class SequenceRules:
    """Checks the text of each sequence of an engine against the first run of its prompt, which has no drafts."""

    def __init__(self, checks: Checks, *, is_overlapped: bool) -> None:
        """is_overlapped: whether the engine requests drafts while a step is in flight."""
        self._checks = checks
        self._is_overlapped = is_overlapped
        self._outputs: dict[tuple[int, ...], list[int]] = {}
        self._scenarios: deque[Scenario] = deque(scenario for scenario in Scenario if scenario is not Scenario.NONE)

    def assign(self, prompt: tuple[int, ...]) -> Scenario:
        """Return the scenario of a sequence that starts."""
        if prompt not in self._outputs:
            return Scenario.NONE
        return self._scenarios.popleft() if self._scenarios else Scenario.RIGHT

    def after(self, prompt: tuple[int, ...], output: list[int]) -> list[int]:
        """Return the tokens that are expected after an output; none if it is not as before."""
        expected = self._outputs.get(prompt, [])
        return expected[len(output) :] if expected[: len(output)] == output else []

    def draft(self, sequence: Sequence, limit: int, vocab_size: int) -> list[int]:
        """Return the draft that the scenario of a sequence plans; limit: its maximum length."""
        path = self.after(sequence.prompt, sequence.output)[: min(limit, MAX_DRAFT)]
        wrong = [(token + 1) % (vocab_size or MAX_TOKEN_ID) for token in path]
        if sequence.scenario is Scenario.WRONG:
            path = wrong
        elif sequence.scenario is Scenario.RIGHT and sequence.batches % 2 and len(path) > 1:
            path = [*path[:-1], wrong[-1]]
        sequence.draft = path
        sequence.had_draft |= bool(path)
        sequence.batches += 1
        return path

    def commit(self, sequence: Sequence, tokens: list[int], verified: int, steps: int) -> None:
        """Check the tokens of some steps, and add them to the output."""
        check, sequence.event = sequence.event or "counts", None if tokens else sequence.event
        drafted = len(sequence.draft)
        self._checks.expect(
            check, verified <= drafted, f"{sequence.label} verified {verified} tokens of a draft of {drafted}"
        )
        if tokens:
            self._check_counts(sequence, tokens, verified, max(1, steps), check)
            sequence.output = [*sequence.output, *tokens]
            sequence.draft = []
            self._check_output(sequence, check if check == "error" else "output")

    def restart(self, sequence: Sequence, committed: list[int]) -> None:
        """Check the tokens with which a missing sequence starts again."""
        known, check = len(sequence.output), sequence.event or "finishes"
        kept = common_length(committed, sequence.output)
        self._checks.expect(
            check,
            kept == known,
            f"{sequence.label} had {known} output tokens, and started again with {len(committed)}, of which the "
            f"first {kept} are the same; a start has all committed tokens",
        )
        sequence.output, sequence.event, sequence.is_over = committed, None, False
        self._check_output(sequence, check)
        self._checks.see(check)

    def end(self, sequence: Sequence) -> None:
        """Keep the output of a finished sequence that had no drafts."""
        if sequence.scenario is Scenario.NONE and sequence.output:
            self._outputs.setdefault(sequence.prompt, sequence.output)
        if sequence.scenario in EVENTS:
            self._scenarios.append(sequence.scenario)  # It was too short for the event.

    def _check_counts(self, sequence: Sequence, tokens: list[int], verified: int, steps: int, check: str) -> None:
        accepted = common_length(sequence.draft[:verified], tokens)
        if sequence.shortfall is not None:
            self._checks.fail(*sequence.shortfall)
        says = (
            f"{sequence.label} committed {len(tokens)} tokens in steps={steps} with verified={verified}; its draft "
            f"agrees in {accepted} of the verified tokens, "
        )
        if self._is_overlapped:
            # Tokens may be accepted ones of other drafts as well.
            self._checks.expect(check, len(tokens) >= steps, f"{says}and a step makes one token at least")
        else:
            says += f"which makes {accepted + steps} tokens"
            self._checks.expect(check, len(tokens) <= accepted + steps, says)
            # The end of an output may be cut, at a stop token or at the maximum length.
            sequence.shortfall = (check, says) if len(tokens) < accepted + steps else None
        if accepted:
            self._checks.see("drafts used")
        if accepted or check != "counts":
            self._checks.see(check)

    def _check_output(self, sequence: Sequence, check: str) -> None:
        if sequence.had_draft:
            self._checks.see("output")
        expected, output = self._outputs.get(sequence.prompt, []), sequence.output
        index = common_length(expected, output)
        if index < min(len(expected), len(output)):
            self._checks.fail(
                check,
                f"output token {index} of {sequence.label} is {output[index]}, another one than in the run of the same "
                "prompt without drafts; run greedily, and send each committed token once",
            )


def common_length(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))
