"""Settings of a run. Does not import heavy modules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Everything that determines what a run computes, apart from the drafter."""

    problems: int = 16
    """Number of problems; an epoch is one rollout of each group."""
    problems_per_step: int = 16
    samples: int = 8
    """Number of samples in a group."""
    prompt_tokens: int = 96
    """Largest number of prompt tokens; longer prompts are truncated at the start."""
    max_tokens: int = 128
    """Largest number of tokens of an output."""
    learning_rate: float = 5e-4
    """Constant. The mean reward of step 14 was 0.24 with 2e-4, 0.32 with 3e-4 and 0.35 with 5e-4."""
    seed: int = 0
    max_sequences: int = 64
    """Number of sequences that run at the same time, on all engines together. Without drafts, 16, 32 and 128 were not
    faster."""
    engines: int = 1
    """1: the engine is in the trainer's process. More: each has a process of its own, with its share of the threads."""
    threads: int = 2
    """PyTorch's threads of the trainer and of all engines together. Fixed, because sums of floats depend on it."""

    def __post_init__(self) -> None:
        """Raise ValueError for a step that does not divide an epoch, or fewer threads than engines."""
        if self.problems % self.problems_per_step:
            raise ValueError(f"{self.problems} problems are not a multiple of {self.problems_per_step} per step")
        if self.threads < self.engines:
            raise ValueError(f"{self.engines} engines need at least as many threads, not {self.threads}")

    def problems_of(self, step: int) -> range:
        """Return the numbers of the problems of a training step."""
        first = step * self.problems_per_step % self.problems
        return range(first, first + self.problems_per_step)

    def epoch_of(self, step: int) -> int:
        """Return the number of the epoch that a training step belongs to, from 0."""
        return step * self.problems_per_step // self.problems
