"""What is known of a namespace and of the service, as reports and metrics read it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drafter_service.observability.history import History
from drafter_service.observability.latency import Latency
from ssd.stats import Stats


@dataclass(frozen=True)
class ModelIdentity:
    """What decides whether token ids mean the same, and whether text is alike."""

    name: str = ""
    tokenizer: str = ""
    """A fingerprint."""
    adapter: str = ""
    """Of a LoRA adapter; empty without one."""
    vocabulary_size: int = 0
    """Token ids are below this; 0 if that is not known."""


@dataclass
class ClientTotals:
    """Sums of what clients count, over all that ever were."""

    timeouts: int = 0
    dropped: int = 0
    resyncs: int = 0
    reconnects: int = 0


@dataclass(frozen=True)
class CorpusFacts:
    """How full a corpus is and what became of it."""

    capacity: int
    tokens: int
    """Remembered now, separators included."""
    requests: int
    """Remembered now; pieces of very long ones count each."""
    appended_tokens: int
    """Ever, those that were forgotten or overwritten since included."""
    waiting_tokens: int
    """Learned, but not draftable yet."""
    merges: int
    """Times that finished requests became draftable."""
    base_merges: int
    full_builds: int
    forgotten: int
    """Requests, or pieces of long ones."""


@dataclass(frozen=True)
class Passage:
    """A piece of remembered text that drafts came from."""

    accepted: int
    """Draft tokens from it that were accepted."""
    age_tokens: int
    """How many tokens were remembered after it."""
    tokens: np.ndarray
    """uint32 [n]."""


@dataclass(frozen=True)
class NamespaceFacts:
    """All that is known of one namespace. The statistics are those of the running service, not copies."""

    name: str
    model: ModelIdentity
    stats: Stats
    history: History
    corpus: CorpusFacts
    memory_bytes: int
    streams: int
    """That draft from it now."""
    sequences: int
    """That run in it now."""
    draft_latency: Latency = field(default_factory=Latency)
    """Of one message: its whole batch."""
    merge_latency: Latency = field(default_factory=Latency)
    """Of the maintainer's refreshes in which something was done."""
    clients: ClientTotals = field(default_factory=ClientTotals)
    duplicates: int = 0
    """Texts that were offered again after they had been learned."""
    passages: tuple[Passage, ...] | None = None
    """None unless they were asked for; most productive first."""


@dataclass(frozen=True)
class LogFacts:
    """The shared log, as this replica sees it."""

    published_tokens: int = 0
    consumed_tokens: int = 0
    duplicates: int = 0
    dropped_tokens: int = 0
    """That waited for the log for too long."""
    malformed: int = 0
    """Entries that were skipped."""
    gaps: int = 0
    """Times that entries may have been missed: trimmed before they were read, or lost with Redis."""
    errors: int = 0
    is_connected: bool = False
    lag_entries: int = 0
    """An estimate."""
    lag_s: float = 0.0


@dataclass(frozen=True)
class ServiceFacts:
    """The service and its namespaces."""

    version: str
    started_at: float
    """Seconds since 1970."""
    now: float
    memory_bytes: int
    """Resident, of the whole process."""
    namespaces: tuple[NamespaceFacts, ...]
    refused: int = 0
    """Requests and streams that were refused."""
    failed_saves: int = 0
    """Snapshots that could not be saved."""
    log: LogFacts | None = None
    """None without a shared log."""
