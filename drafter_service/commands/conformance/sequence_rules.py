"""Rules for the text of a sequence, and for what the engine says of its steps."""

from __future__ import annotations

from drafter_service.commands.conformance.checks import Checks
from drafter_service.commands.conformance.observed import MAX_DRAFT, Predictions, Scenario, Sequence


class SequenceRules:
    """Checks each sequence of an engine."""

    def __init__(self, checks: Checks, predictions: Predictions, *, is_overlapped: bool) -> None:
        """is_overlapped: whether the engine requests drafts while a step is in flight."""
        self._checks = checks
        self._predictions = predictions
        self._is_overlapped = is_overlapped

    def commit(self, sequence: Sequence, tokens: list[int], verified: int, steps: int) -> None:
        """Check the tokens of some steps, and add them to the output."""
        check, sequence.event = sequence.event or "counts", None if tokens else sequence.event
        if verified > len(sequence.draft):
            self._checks.fail(check, f"{sequence.label} verified {verified} tokens of a draft of {len(sequence.draft)}")
        if tokens:
            self._check_counts(sequence, tokens, verified, max(1, steps), check)
            sequence.output = [*sequence.output, *tokens]
            sequence.draft = []
            self._check_output(sequence, check if check == "error" else "output")

    def restart(self, sequence: Sequence, committed: list[int]) -> None:
        """Check the tokens with which a missing sequence starts again."""
        known, check = len(sequence.output), sequence.event or "finishes"
        if committed[:known] != sequence.output:
            kept = common_length(committed, sequence.output)
            self._checks.fail(
                check,
                f"{sequence.label} had {known} output tokens, and started again with {len(committed)}, of which the "
                f"first {kept} are the same; a start has all committed tokens",
            )
        sequence.output, sequence.event = committed, None
        sequence.is_over = False
        self._check_output(sequence, check)
        self._checks.see(check)

    def end(self, sequence: Sequence) -> None:
        """Check that a finished sequence has used its drafts."""
        if sequence.scenario is Scenario.RIGHT and sequence.offered > 2 * MAX_DRAFT:
            if sequence.accepted == 0:
                self._checks.fail(
                    "drafts used", f"{sequence.label} got {sequence.offered} right draft tokens, and accepted none"
                )
            self._checks.see("drafts used")

    def _check_counts(self, sequence: Sequence, tokens: list[int], verified: int, steps: int, check: str) -> None:
        accepted = common_length(sequence.draft[:verified], tokens)
        sequence.accepted += accepted
        if sequence.shortfall is not None:
            self._checks.fail(*sequence.shortfall)
        says = (
            f"{sequence.label} committed {len(tokens)} tokens in steps={steps} with verified={verified}; its draft "
            f"agrees in {accepted} of the verified tokens, "
        )
        if self._is_overlapped:
            # Tokens may be accepted ones of other drafts as well.
            if len(tokens) < steps:
                self._checks.fail(check, f"{says}and a step makes one token at least")
        else:
            says += f"which makes {accepted + steps} tokens"
            if len(tokens) > accepted + steps:
                self._checks.fail(check, says)
            # The end of an output may be cut, at a stop token or at the maximum length.
            sequence.shortfall = (check, says) if len(tokens) < accepted + steps else None
        if sequence.accepted or check != "counts":
            self._checks.see(check)

    def _check_output(self, sequence: Sequence, check: str) -> None:
        if sequence.offered > MAX_DRAFT:
            self._checks.see("output")
        index = self._predictions.difference(sequence)
        if index is not None:
            self._checks.fail(
                check,
                f"output token {index} of {sequence.label} is {sequence.output[index]}, another one than in the run of "
                "the same prompt without drafts; run greedily, and send each committed token once",
            )


def common_length(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))
