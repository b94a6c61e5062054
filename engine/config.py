"""Settings of the engine. Numbers that someone chose say how they were found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ssd.config import DraftShape
from ssd.errors import UserError

Verification = Literal["exact", "rejection"]


@dataclass(frozen=True)
class EngineConfig:
    """Limits on concurrency and memory, and how drafts are verified."""

    max_sequences: int = 64
    """Largest number of sequences that run at the same time; further ones are queued."""
    max_step_tokens: int = 2048
    """Largest number of tokens in a step; longer prompts run in chunks, batched with the decoding of other
    sequences."""
    page_size: int = 16
    """Tokens in a page of KV cache."""
    kv_memory_mib: int | None = None
    """Memory for the KV cache in MiB; less is allocated if `max_sequences` full context windows need less. None: what
    one full context window takes, at least 256 MiB, but at most half of the free memory."""
    watermark: float = 0.01
    """Fraction of the pages kept free for running sequences when a request is admitted; vLLM's value."""
    max_draft: int = 16
    """Largest number of draft tokens verified for a sequence in a step."""
    draft_shape: DraftShape = "path"
    """`path`: verify a draft tree only up to its first branch. `tree`: verify the whole tree."""
    verification: Verification = "exact"
    """How drafts are accepted when sampling, unless a request sets its own mode. `exact`: a draft token is accepted if
    it is the one that decoding without drafts produces. `rejection`: speculative sampling; outputs have the same
    distribution."""
    in_flight: int | None = None
    """Largest number of steps in flight when the next one is launched. 0: the results of each step are read first. 1 or
    None: a step that does not depend on them is launched before. On a CPU, only 1 uses the graph executor. For
    debugging and benchmarks."""

    def __post_init__(self) -> None:
        """Raise ValueError for a setting that is out of range."""
        for name, least in (("max_sequences", 1), ("page_size", 1), ("kv_memory_mib", 1), ("max_draft", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if self.draft_shape not in ("path", "tree"):
            raise ValueError(f"draft_shape must be 'path' or 'tree', not {self.draft_shape!r}")
        if self.verification not in ("exact", "rejection"):
            raise ValueError(f"verification must be 'exact' or 'rejection', not {self.verification!r}")
        if self.in_flight not in (None, 0, 1):
            raise ValueError(f"in_flight must be 0, 1 or None, not {self.in_flight!r}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be at least 0 and less than 1, not {self.watermark}")
        if self.max_step_tokens < self.max_sequences * (1 + self.max_draft):
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) must hold a draft for every sequence, "
                f"max_sequences * (1 + max_draft) = {self.max_sequences * (1 + self.max_draft)}"
            )


@dataclass(frozen=True)
class ContextWindow:
    """Largest number of tokens of a prompt and its output together, and what limits it."""

    tokens: int
    of_model: int
    """Number of tokens that the model allows."""
    kv_memory_mib: int | None = None
    """Memory for the KV cache in MiB, which limits `tokens` if the model allows more."""

    def check(self, prompt: int, output: int) -> None:
        """Raise UserError if a prompt of `prompt` tokens leaves no room for an output of up to `output` tokens."""
        if prompt + min(1, output) > self.tokens:
            raise UserError(
                f"the prompt has {prompt} tokens; the context window of {self} must hold it and at least one token of "
                "output: shorten the prompt"
            )

    def __str__(self) -> str:
        """Return the number with its unit and, if memory limits it, what would raise it."""
        if self.tokens == self.of_model or self.kv_memory_mib is None:
            return f"{self.tokens} tokens"
        needed = -(-self.kv_memory_mib * self.of_model // self.tokens)
        return (
            f"{self.tokens} tokens (as many as --kv-memory {self.kv_memory_mib} holds; "
            f"{needed} would hold the model's {self.of_model})"
        )
