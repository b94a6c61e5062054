"""Facts about a namespace and the service, as reports and metrics read them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ssd.budget.totals import BudgetTotals

if TYPE_CHECKING:
    # Clients import this module and should not have to load pydantic and numba.
    from drafter_service.observability.report.schema import ClientTotals, CopyReport, CorpusReport, SharedLogReport
    from ssd.stats import Stats

MAX_ENGINES = 64
"""Maximum number of engines that a namespace, and the metrics, tell apart. A sidecar serves the engines of one machine,
seldom more than 8, and each restart of an engine without a name of its own adds one. Each takes 4 kB of memory in a
namespace, and 5 series of metrics."""
MAX_SAMPLES = 512
BOUNDS_S = tuple(1e-5 * 2 ** (step / 2) for step in range(41))
"""Upper bounds of the bins of `Latency` in seconds, 10 us to 10 s, each 1.41 times the previous one; a last bin has no
bound."""


class Sample(NamedTuple):
    """Totals of a namespace at one time."""

    time: float
    """Seconds since 1970."""
    steps: int
    committed: int
    hits: int
    drafted: int
    accepted: int
    corpus_tokens: int
    appended_tokens: int
    memory_bytes: int
    timeouts: int


class History:
    """Samples of totals, oldest first, in bounded memory: intervals between older samples are larger."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def record(self, sample: Sample) -> None:
        """Add a sample. When there are too many, drop every second one of the older half."""
        # If the clock was set back, samples that are now in the future have wrong times.
        while self.samples and self.samples[-1].time >= sample.time:
            self.samples.pop()
        self.samples.append(sample)
        if len(self.samples) > MAX_SAMPLES:
            half = MAX_SAMPLES // 2
            self.samples[1:half] = self.samples[1:half:2]


class Latency:
    """A histogram of durations; adding one takes a fraction of a microsecond. One thread writes it."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0
        self.longest_s = 0.0

    def record(self, seconds: float) -> None:
        """Add a duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    @property
    def count(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Return the upper bound in seconds of the bin that contains a quantile, 0 <= share <= 1; 0 without data."""
        wanted, seen = share * self.count, 0
        for bound, count in zip((*BOUNDS_S, self.longest_s), self.counts, strict=True):
            seen += count
            if count and seen >= wanted:
                return min(bound, self.longest_s)
        return 0.0


@dataclass(frozen=True)
class ModelIdentity:
    """Identity of a model. See `Model` in the protocol."""

    name: str = ""
    tokenizer: str = ""
    """Fingerprint of the tokenizer."""
    adapter: str = ""
    """Name of the LoRA adapter; empty without one."""
    vocab_size: int = 0
    """Token ids are below this; 0 if it is not known."""
    vocabulary: str = ""
    """Fingerprint of the vocabulary, the same for all files of one tokenizer; "" if it is not known."""
    configuration: str = ""
    """Type of the model, a colon, and a fingerprint of its configuration; "" if it is not known."""

    def has_tokenizer_of(self, other: ModelIdentity) -> bool:
        """Return whether both models are known to have the same tokenizer."""
        return bool(self.tokenizer == other.tokenizer != "" or self.vocabulary == other.vocabulary != "")


class Engine(NamedTuple):
    """Identity of an engine, as its client says."""

    client: str
    """Names and versions of its software and of its client, such as "vllm/0.32.0 ssd-drafter/0.1.0"."""
    name: str
    """Its own name, such as "node-3:4711"; "" if it is not known."""

    @property
    def host(self) -> str:
        """Name of its software, such as "vllm"."""
        return self.client.split(" ")[0].split("/")[0]


OTHER_ENGINES = Engine("other", "other")
"""Engines beyond `MAX_ENGINES`, counted together."""


@dataclass
class EngineUse:
    """Use of a namespace by one engine, since the namespace was loaded."""

    stats: Stats
    """Its part of the namespace's statistics."""
    streams: int = 0
    """Connected now."""
    engine_steps: int = 0
    """Engine steps with a request for drafts, or with none because the service had been late."""
    late_steps: int = 0
    """Engine steps among them without drafts because the service was late, as of the client's last counters."""
    offered: int = 0
    """Draft tokens that were sent to it."""
    disconnected_at: float = 0.0
    """Time of `time.monotonic` at which its last stream ended."""


@dataclass(frozen=True)
class NamespaceFacts:
    """Facts about one namespace. Latencies and the statistics of engines are references to those of the running
    service, not copies.
    """

    name: str
    model: ModelIdentity
    stats: Stats
    history: History
    corpus: CorpusReport
    """Facts of the corpus; fields that depend on rates are not set."""
    clients: ClientTotals
    shadow: Stats
    """What withheld drafts would have gained, since the namespace was loaded, as if an engine had verified them."""
    memory_bytes: int
    streams: int
    """Connected now."""
    sequences: int
    """Running now."""
    draft_latency: Latency = field(default_factory=Latency)
    """Time to answer one message, which requests the drafts of a whole batch."""
    merge_latency: Latency = field(default_factory=Latency)
    """Time of the refreshes that merged something."""
    duplicates: int = 0
    """Texts that were sent again after they had been learned."""
    copies: tuple[CopyReport, ...] = ()
    libraries: tuple[str, ...] = ()
    """Namespaces whose text is drafted in this one, too."""
    uses: Mapping[Engine, EngineUse] = field(default_factory=dict)
    """By engine, since the namespace was loaded."""
    budget: BudgetTotals = field(default_factory=BudgetTotals)
    """Totals of the engines' token budgets, since the namespace was loaded."""

    def sample(self, now: float) -> Sample:
        """Return the totals at a time, in seconds since 1970."""
        return Sample(
            time=now,
            steps=self.stats.steps,
            committed=self.stats.committed,
            hits=self.stats.hits,
            drafted=self.stats.verified,
            accepted=self.stats.accepted,
            corpus_tokens=self.corpus.tokens,
            appended_tokens=self.corpus.learned_tokens or 0,
            memory_bytes=self.memory_bytes,
            timeouts=self.clients.timeouts,
        )


@dataclass(frozen=True)
class ServiceFacts:
    """The service and its namespaces."""

    version: str
    started_at: float
    """Seconds since 1970."""
    now: float
    memory_bytes: int
    """Resident memory of the whole process."""
    namespaces: tuple[NamespaceFacts, ...]
    refused: int = 0
    """Requests and streams that were refused."""
    failed_saves: int = 0
    """Snapshots that could not be saved."""
    failed_loads: int = 0
    """Times that a stored namespace could not be loaded."""
    set_aside: Mapping[str, list[str]] = field(default_factory=dict)
    """Names of the damaged files that were set aside, by namespace."""
    memory_limit: int = 0
    """Maximum memory of all namespaces, in bytes."""
    unevictable_bytes: int = 0
    """Part of it that is counted for namespaces that cannot be unloaded."""
    log: SharedLogReport | None = None
    """None without a shared log."""
