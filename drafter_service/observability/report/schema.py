"""The JSON document of a report. `python -m drafter_service.observability.report.schema` prints its schema.

Within a version fields may be added. Removing a field or changing its meaning requires a new version. A share with the
denominator 0 is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

SCHEMA_VERSION: Literal[5] = 5

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[FiniteFloat, Field(ge=0)]
Share = Annotated[FiniteFloat, Field(ge=0, le=1)]
Moment = FiniteFloat


def ratio(part: float, whole: float) -> float | None:
    """Return `part / whole`, at least 0; None for a `whole` of 0 or a result that is not finite."""
    value = part / whole if whole > 0 else math.inf
    return max(0.0, value) if math.isfinite(value) else None


def share(part: float, whole: float) -> float | None:
    """Return `ratio`, at most 1: counters that are read while they grow may be inconsistent with one another."""
    value = ratio(part, whole)
    return None if value is None else min(1.0, value)


def _quotient(of: Callable[[float, float], float | None], part: str, whole: str, more: str = "") -> Any:
    """Return a field that is the ratio or share of two fields before it, unless a value is given."""
    return Field(default_factory=lambda known: of(known[part], known[whole]), description=f"{part} / {whole}{more}.")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)


class Tally(_Part):
    """Counts of a group of draft tokens."""

    drafted: Count = Field(description="Draft tokens that the target verified.")
    accepted: Count = Field(description="Draft tokens that the target accepted.")
    acceptance: Share | None = _quotient(share, "accepted", "drafted")


class StepTally(Tally):
    """Counts of steps, and of their draft tokens."""

    steps: Count = Field(description="Steps of sequences, with or without a draft; one step of a batch of 8 is 8.")
    committed: Count = Field(description="Tokens that the target produced: accepted draft tokens and bonus tokens.")
    tokens_per_step: Amount | None = _quotient(ratio, "committed", "steps", "; 1 is plain decoding")


class HitTally(StepTally):
    """Counts of steps, of those with a draft, and of draft tokens."""

    hits: Count = Field(description="Steps of sequences in which a draft was verified.")
    hit_rate: Share | None = _quotient(share, "hits", "steps")


class Drafting(HitTally):
    """Totals of drafting, and what follows from them. Only tokens that the target verified count as drafted."""

    saved_steps: Count = Field(
        default_factory=lambda known: max(0, known["committed"] - known["steps"]) if known["steps"] else 0,
        description="Additional steps that plain decoding would have needed: committed - steps.",
    )
    saved_share: Share | None = _quotient(share, "saved_steps", "committed", ", the steps of plain decoding")
    drafted_per_step: Amount | None = _quotient(ratio, "drafted", "steps")
    break_even_cost: Amount | None = Field(
        default_factory=lambda known: ratio(known["saved_steps"], known["drafted"]),
        description="Drafting is worthwhile if verifying one more token costs less than this fraction of a step: "
        "(tokens_per_step - 1) / drafted_per_step. Null if nothing was drafted.",
    )


class Recent(_Part):
    """The last hour, or the time since the start if that is shorter."""

    seconds: Amount = Field(description="Length of that time, in seconds.")
    drafting: Drafting = Field(description="Drafting in that time.")
    output_tokens_per_s: Amount = Field(description="Tokens that the target produced, per second.")
    learned_tokens_per_s: Amount = Field(description="Tokens that the corpus learned, per second.")


class Period(HitTally):
    """An interval between two samples. Counts are those of the interval."""

    begins_at: Moment = Field(description="Seconds since 1970.")
    ends_at: Moment = Field(description="Seconds since 1970.")
    timeouts: Count = Field(description="Engine steps whose drafts came too late.")
    learned_tokens: Count = Field(description="Tokens that the corpus learned.")
    corpus_tokens: Count = Field(description="Tokens remembered at the end.")
    memory_bytes: Count = Field(description="Memory of the namespace at the end, in bytes.")


class PositionTally(Tally):
    """Draft tokens at one position."""

    position: int = Field(
        ge=1, description="Position in the draft, from 1; in a tree, the depth. 129 includes all later positions."
    )
    accepted_share_of_drafts: Share | None = Field(
        description="accepted / hits of the namespace: share of drafts that were accepted up to this position."
    )


class SourceTally(Tally):
    """Draft tokens from one source."""

    source: Literal["corpus", "local", "fallback", "library"] = Field(
        description="corpus: finished requests, and outputs of other running requests. "
        "local: the text of the running request itself. "
        "fallback: in no match; requests produced them where no match was right. "
        "library: finished requests of the namespaces that this one reads; left out if there is none."
    )


class AgeTally(Tally):
    """Draft tokens from text of similar age; tokens of the sources `fallback` and `library` have none."""

    least_tokens: Count = Field(
        description="Minimum age: number of tokens after it, in the corpus or in the running request."
    )
    most_tokens: Count | None = Field(description="Maximum age, in tokens. Null: no bound.")


class Age(_Part):
    """Age of the text that drafts came from."""

    median_tokens: Count | None = Field(
        description="Half of the accepted draft tokens came from text of at most this age, in tokens; "
        "the upper bound of its bin."
    )
    bins: list[AgeTally] = Field(description="Ascending by age, without empty bins at both ends.")


class PathProbBin(_Part):
    """Draft tokens with similar path probability: the product of `accept_prob` from the root to the token."""

    least_path_prob: Share = Field(description="Lower bound of the path probability.")
    most_path_prob: Share = Field(description="Upper bound of the path probability, exclusive.")
    drafted: Count = Field(description="Draft tokens that the target verified.")
    predicted: Share | None = Field(description="Mean path probability.")
    acceptance: Share | None = Field(description="Share of the draft tokens that was accepted.")


class Calibration(_Part):
    """Accuracy of path probabilities as predictions of acceptance."""

    error: Share | None = Field(
        description="Mean of |predicted - acceptance| over all draft tokens; 0 is a perfect prediction."
    )
    bins: list[PathProbBin] = Field(description="20 equal bins of path probability, ascending, without empty bins.")


class CorpusReport(_Part):
    """Contents of the corpus, and its counters."""

    tokens: Count = Field(description="Tokens remembered now, including separators of requests.")
    requests: Count = Field(description="Requests remembered now; pieces of very long ones count separately.")
    capacity_tokens: Count = Field(description="Maximum number of tokens remembered.")
    occupancy: Share | None = _quotient(share, "tokens", "capacity_tokens", ", at most 1")
    learned_tokens: Count = Field(
        description="Tokens learned in total, including those overwritten or forgotten since."
    )
    turnovers: Amount | None = _quotient(
        ratio, "learned_tokens", "capacity_tokens", ": times that the corpus was overwritten"
    )
    turnover_s: Amount | None = Field(
        default=None, description="Seconds to overwrite the whole corpus at the recent rate. Null: rate 0 or not known."
    )
    waiting_tokens: Count = Field(description="Tokens learned but not draftable yet.")
    forgotten_requests: Count = Field(description="Requests forgotten on demand; pieces of long ones count separately.")
    dropped_requests: Count = Field(
        default=0, description="Requests that were not learned because too many were waiting to become draftable."
    )
    merges: Count = Field(description="Times that finished requests became draftable.")
    base_merges: Count = Field(description="Merges into the base tier, the largest part of the suffix array.")
    full_builds: Count = Field(description="Times that the whole suffix array was sorted.")


class DurationBin(_Part):
    """Durations of similar length."""

    least_s: Amount = Field(description="Lower bound in seconds, exclusive.")
    most_s: Amount | None = Field(description="Upper bound in seconds, inclusive. Null: no bound.")
    count: Count = Field(description="Number of durations.")


class LatencyReport(_Part):
    """A distribution of durations. Quantiles are upper bounds of bins, each 1.41 times the previous one."""

    count: Count = Field(description="Number of durations measured.")
    mean_s: Amount | None = Field(default=None, description="Mean, in seconds.")
    p50_s: Amount | None = Field(default=None, description="Median, in seconds.")
    p90_s: Amount | None = Field(default=None, description="90th percentile, in seconds.")
    p99_s: Amount | None = Field(default=None, description="99th percentile, in seconds.")
    longest_s: Amount | None = Field(default=None, description="Maximum, in seconds.")
    bins: list[DurationBin] = Field(description="Ascending, without empty bins at both ends.")


class ClientTotals(BaseModel):
    """Counters of the engines' clients, summed over all that ever connected."""

    timeouts: Count = Field(
        default=0, description="Late steps: engine steps that ran without drafts because the answer came too late."
    )
    dropped: Count = Field(default=0, description="Answers that came too late and were dropped.")
    resyncs: Count = Field(
        default=0, description="Sequences that were sent again because the service did not have them."
    )
    reconnects: Count = Field(default=0, description="Connections that were re-established.")


class ClientReport(StepTally):
    """Use of a namespace by one engine, since the namespace was loaded."""

    client: str = Field(description="Names and versions of the engine's software and its client.")
    engine: str = Field(
        default="",
        description='Name of the engine; "" if it is not known, and "other", as the client, for all beyond 64 engines.',
    )
    streams: Count = Field(description="Connected now.")
    offered: Count = Field(default=0, description="Draft tokens that were sent to the engine.")
    engine_steps: Count = Field(
        default=0,
        description="Engine steps with a request for drafts, or with none because earlier answers were late.",
    )
    late_steps: Count = Field(
        default=0, description="Engine steps among them without drafts because the answer was late."
    )
    late_share: Share | None = _quotient(share, "late_steps", "engine_steps")


class CopyReport(_Part):
    """A copy of the corpus in an engine's process, from which it drafts."""

    engine: str = Field(description='Name of the engine; "" if it is not known.')
    tokens: Count = Field(description="Tokens that it holds: those of the corpus, or the newest up to its limit.")
    missing_changes: Count = Field(description="Texts learned or forgotten that were not sent to it yet.")


class ShadowReport(_Part):
    """Shadow mode: drafts that were withheld, and compared with the tokens that the target produced without them."""

    drafting: Drafting = Field(description="As if the target had verified these drafts, apart from all other counts.")


class VersionReport(StepTally):
    """Rollouts of one version of the policy that have ended, since the namespace was loaded."""

    version: Count = Field(description="Training step of the policy, as rollouts say.")
    requests: Count = Field(description="Rollouts that ended, aborted ones included.")


class StepSize(_Part):
    """Engines' steps with similar numbers of tokens."""

    most_tokens: Count | None = Field(
        description="Maximum number of tokens; each step has more than half of it. Null: no maximum."
    )
    steps: Count = Field(description="Steps that were recorded; of the later ones of an engine, every fourth is.")
    mean_s: Amount = Field(description="Mean duration, in seconds.")
    expected_s: Amount = Field(description="Mean duration that was predicted for these steps, in seconds.")


class BudgetReport(_Part):
    """How much was drafted, by the durations of steps that engines reported."""

    withheld_tokens: Count = Field(
        description="Draft tokens that were not verified because they were not worth the time."
    )
    ignored_steps: Count = Field(description="Reported steps with impossible values, which were ignored.")
    step_sizes: list[StepSize] = Field(description="Ascending by number of tokens, without sizes that never ran.")


class ModelReport(_Part):
    """The model that is served."""

    name: str = Field(description="The model's name.")
    tokenizer: str = Field(description="A fingerprint of the tokenizer.")
    adapter: str = Field(description="The name of the LoRA adapter; empty without one.")
    vocab_size: Count | None = Field(description="Token ids are below this. Null: not known.")


class CounterTables(_Part):
    """The counters of a namespace as tables."""

    drafting: Drafting = Field(description="Totals since the counters began; snapshots preserve them over restarts.")
    by_position: list[PositionTally] = Field(description="By position in the draft, up to the last one used.")
    by_source: list[SourceTally] = Field(description="By source of the draft token.")
    age: Age = Field(description="By age of the text that drafts came from.")
    calibration: Calibration = Field(description="Accuracy of path probabilities as predictions of acceptance.")


class NamespaceReport(CounterTables):
    """An isolated corpus and the drafting from it."""

    name: str = Field(description="The namespace.")
    model: ModelReport = Field(description="The model that is served.")
    recent: Recent | None = Field(default=None, description="The last hour. Null: the service has just started.")
    over_time: list[Period] = Field(description="Consecutive periods, oldest first.")
    corpus: CorpusReport = Field(description="Contents of the corpus, and its counters.")
    draft_latency: LatencyReport = Field(
        description="Time to answer one message of an engine, with the drafts of its whole batch."
    )
    merge_latency: LatencyReport = Field(description="Time of the maintainer's refreshes that merged something.")
    clients: ClientTotals = Field(description="Counters of the engines' clients.")
    by_client: list[ClientReport] = Field(description="By engine, most tokens first.")
    by_version: list[VersionReport] | None = Field(
        default=None,
        description="The versions of the policy whose rollouts ended last, at most 16, ascending. Null: no rollouts.",
    )
    shadow: ShadowReport | None = Field(
        default=None,
        description="Since the namespace was loaded. Null: no token was committed in shadow mode.",
    )
    budget: BudgetReport = Field(description="Since the namespace was loaded.")
    memory_bytes: Count = Field(description="Memory of the namespace, in bytes.")
    copies: list[CopyReport] = Field(default=[], description="Copies of the corpus in engines that are connected now.")
    libraries: list[str] = Field(description="Namespaces whose text is drafted in this one, too.")
    streams: Count = Field(description="Engines connected now.")
    sequences: Count = Field(description="Sequences running now whose drafts this service makes.")
    duplicates: Count = Field(description="Texts that were sent again after they had been learned.")


class SharedLogReport(_Part, frozen=False):
    """The log of finished requests that sidecars share, as this one sees it."""

    is_connected: bool = Field(default=False, description="Whether it can be reached now.")
    published_tokens: Count = Field(default=0, description="Tokens that this sidecar wrote to the log.")
    consumed_tokens: Count = Field(default=0, description="Tokens of other sidecars learned from the log.")
    duplicates: Count = Field(default=0, description="Requests read from it that were already known.")
    dropped_tokens: Count = Field(
        default=0, description="Tokens never written because the log was too slow or unreachable."
    )
    malformed: Count = Field(default=0, description="Invalid entries, which were skipped.")
    gaps: Count = Field(
        default=0, description="Times that entries may have been missed: trimmed before they were read, or lost."
    )
    errors: Count = Field(default=0, description="Failed calls.")
    lag_s: Amount = Field(
        default=0.0, description="Age of the newest entry that was read, relative to the newest one, in seconds."
    )


class ServiceReport(_Part):
    """The service that made the report."""

    version: str = Field(description="Version of ssd-drafter.")
    started_at: Moment = Field(description="Seconds since 1970.")
    uptime_s: Amount = Field(description="Seconds.")
    memory_bytes: Count = Field(description="Resident memory of the whole process, in bytes.")
    refused: Count = Field(description="Requests and streams that were refused.")
    set_aside: dict[str, list[str]] = Field(
        default={}, description="Names of the damaged files that were set aside, by namespace."
    )
    log: SharedLogReport | None = Field(description="Null: the service has no shared log.")


class Report(_Part):
    """What drafting has saved so far."""

    schema_version: Literal[5] = Field(description="Version of this schema.")
    taken_at: Moment = Field(description="Seconds since 1970.")
    service: ServiceReport = Field(description="The service that made the report.")
    total: Drafting = Field(description="Totals over all namespaces of this report.")
    namespaces: list[NamespaceReport] = Field(description="Sorted by name.")


def schema_json() -> str:
    """Return the JSON schema of a report, the content of docs/report.schema.json."""
    schema = Report.model_json_schema(mode="serialization")
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


if __name__ == "__main__":
    print(schema_json(), end="")
