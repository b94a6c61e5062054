"""Named checks, their outcomes, and the list that is printed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Check:
    """One rule of the protocol."""

    name: str
    claim: str
    """The rule, as a sentence."""
    advice: str = ""
    """How to bring about the situation that the check is about."""
    is_optional: bool = False
    """Whether the rule need not be tested, because it is about fields that need not be sent."""
    is_seen: bool = False
    """Whether there was a situation that the check is about."""
    failure: str | None = None
    """The first violation, as a sentence."""

    @property
    def has_passed(self) -> bool:
        """Whether the rule was tested, unless it is optional, and always followed."""
        return (self.is_seen or self.is_optional) and self.failure is None

    @property
    def line(self) -> str:
        """Return the outcome as a line."""
        if self.is_seen and self.failure is None:
            return f"pass  {self.name}: {self.claim}"
        if self.has_passed:
            return f"skip  {self.name}: {self.advice}"
        return f"FAIL  {self.name}: {self.failure or f'not tested; {self.advice}'}"


class Checks:
    """A list of checks."""

    def __init__(self, checks: Iterable[Check]) -> None:
        self._checks = {check.name: check for check in checks}

    def see(self, name: str) -> None:
        """Record that a rule was followed."""
        self._checks[name].is_seen = True

    def fail(self, name: str, failure: str) -> None:
        """Record that a rule was broken; the first failure is kept."""
        check = self._checks[name]
        check.is_seen = True
        check.failure = check.failure or failure

    def expect(self, name: str, holds: bool, otherwise: str) -> None:
        """Record that a rule was broken unless a condition holds."""
        if not holds:
            self.fail(name, otherwise)

    @property
    def are_seen(self) -> bool:
        """Whether all rules were tested that are not optional."""
        return all(check.is_seen or check.is_optional for check in self._checks.values())

    @property
    def failures(self) -> dict[str, str | None]:
        """The checks that have not passed: what was wrong, by name; None for rules that were not tested."""
        return {check.name: check.failure for check in self._checks.values() if not check.has_passed}

    @property
    def lines(self) -> list[str]:
        """Return the outcomes, a line each."""
        return [check.line for check in self._checks.values()]


# --- The checks of an engine

RUN_AGAIN = "run the same prompts again, greedily, with outputs of 32 tokens or more"

RULES = (
    Check("hello", "the first request introduces the client and its model", "no engine has connected"),
    Check("requests", "requests are well formed, with token ids below vocab_size", "no engine has sent a batch"),
    Check("starts", "sequences start once, and before batches and finishes name them", "no sequence started"),
    Check("finishes", "every sequence finishes", "no sequence finished"),
    Check("counts", "tokens, verified and steps agree in every step", RUN_AGAIN),
    Check("drafts used", "drafts are verified and accepted", f"no draft token was accepted; {RUN_AGAIN}"),
    Check(
        "step times",
        "durations of steps are possible, and agree with the tokens of the batch",
        "the engine sends no step_seconds, so the service cannot learn how much to draft for it",
        is_optional=True,
    ),
    Check("output", "drafts do not change the output", RUN_AGAIN),
    Check("late answer", "the draft of a late answer does not count as verified", RUN_AGAIN),
    Check("lost sequence", "a lost sequence starts again with all of its tokens", RUN_AGAIN),
    Check("error", "tokens of a request that was answered with an error are sent again", RUN_AGAIN),
    Check("broken stream", "after a broken stream, sequences start again with all of their tokens", RUN_AGAIN),
)
"""The checks of an engine's side."""
