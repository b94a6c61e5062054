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
