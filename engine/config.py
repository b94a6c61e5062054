"""Settings of the engine. Numbers that someone chose say how they were found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DraftShape = Literal["path", "tree"]
Loop = Literal["plain", "overlapped", "pipelined"]
KvDtype = Literal["auto", "fp8"]
Verification = Literal["exact", "rejection"]


@dataclass(frozen=True)
class EngineConfig:
    """How much runs at once, and in how much memory."""

    max_sequences: int = 64
    """Most sequences that run at the same time; more wait."""
    max_step_tokens: int = 2048
    """Most tokens in one step; longer prompts are run in parts, beside the others' decoding."""
    page_size: int = 16
    """Tokens in a page of KV cache."""
    kv_memory_mib: int = 256
    """Memory for the KV cache; less is taken if `max_sequences` full context windows need less."""
    kv_dtype: KvDtype = "auto"
    """Of the KV cache. `auto`: the model's. `fp8`: float8_e4m3fn, stored without a scale; with FlashInfer alone."""
    prefix_cache: bool = True
    """Whether requests reuse the keys and values of a beginning that they share with earlier ones."""
    watermark: float = 0.01
    """Share of the pages that is left free when a request is admitted, for those that run to grow; vLLM's value."""
    max_draft: int = 16
    """Most draft tokens verified for a sequence in one step."""
    draft_shape: DraftShape = "path"
    """`path`: of a draft tree only its beginning is verified, up to the first branch. `tree`: all of it."""
    verification: Verification = "exact"
    """How drafts are accepted when sampling, unless a request says otherwise. `exact`: a draft token is accepted if it
    is the one that decoding without drafts produces. `rejection`: speculative sampling; outputs have the same
    distribution."""
    loop: Loop = "plain"
    """`plain`: drafting, then the forward, for what has come. `overlapped`: the drafter drafts beside the forward for
    what may come next. `pipelined`: a step is begun before the one before it has ended."""

    def __post_init__(self) -> None:
        """Raises ValueError for a setting out of its range."""
        for name, least in (("max_sequences", 1), ("page_size", 1), ("kv_memory_mib", 1), ("max_draft", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.kv_dtype not in ("auto", "fp8"):
            raise ValueError(f"kv_dtype must be 'auto' or 'fp8', not {self.kv_dtype!r}")
        if self.draft_shape not in ("path", "tree"):
            raise ValueError(f"draft_shape must be 'path' or 'tree', not {self.draft_shape!r}")
        if self.verification not in ("exact", "rejection"):
            raise ValueError(f"verification must be 'exact' or 'rejection', not {self.verification!r}")
        if self.loop not in ("plain", "overlapped", "pipelined"):
            raise ValueError(f"loop must be 'plain', 'overlapped' or 'pipelined', not {self.loop!r}")
        if self.loop == "pipelined" and self.draft_shape == "tree":
            raise ValueError("the pipelined loop verifies paths alone; draft_shape must be 'path'")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be at least 0 and less than 1, not {self.watermark}")
        if self.max_step_tokens < self.max_sequences * (1 + self.max_draft):
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) must hold a draft for every sequence, "
                f"max_sequences * (1 + max_draft) = {self.max_sequences * (1 + self.max_draft)}"
            )
