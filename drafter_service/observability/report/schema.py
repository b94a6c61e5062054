"""The JSON document of a report. `python -m drafter_service.observability.report.schema` prints its schema.

Fields may be added within a version; one that changes its meaning or goes makes another version. A share of nothing is
null, and so is what is not known, as most of it in a report from a snapshot.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

SCHEMA_VERSION: Literal[2] = 2

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[FiniteFloat, Field(ge=0)]
Share = Annotated[FiniteFloat, Field(ge=0, le=1)]
Moment = FiniteFloat


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class Estimate(_Part):
    """What drafting is worth to an engine, by what verifying costs it."""

    cost: Share = Field(description="What verifying one more token costs the engine, as a part of a step.")
    speedup: Amount = Field(
        description="Speed of decoding relative to none: tokens_per_step / (1 + cost * drafted_per_step)."
    )


class Drafting(_Part):
    """What was drafted, and what became of it. Only tokens that the target verified count as drafted."""

    steps: Count = Field(description="Steps of sequences, with or without a draft; a batch of 8 is 8 steps.")
    committed: Count = Field(description="Tokens that the target produced: those accepted and one more each step.")
    hits: Count = Field(description="Steps of sequences in which something drafted was verified.")
    drafted: Count = Field(description="Draft tokens that the target verified.")
    accepted: Count = Field(description="Draft tokens that it kept.")
    saved_steps: Count = Field(description="Steps that plain decoding would have needed more: committed - steps.")
    saved_share: Share | None = Field(description="saved_steps as a part of the steps of plain decoding.")
    hit_rate: Share | None = Field(description="hits / steps.")
    acceptance: Share | None = Field(description="accepted / drafted.")
    tokens_per_step: Amount | None = Field(description="committed / steps; 1 is plain decoding.")
    drafted_per_step: Amount | None = Field(description="drafted / steps.")
    break_even_cost: Amount | None = Field(
        description="Drafting pays while verifying one more token costs less than this part of a step: "
        "(tokens_per_step - 1) / drafted_per_step. Null if nothing was drafted."
    )
    estimates: list[Estimate] = Field(description="Speed for a few costs; empty before the first step.")


class Recent(_Part):
    """The same, of late."""

    seconds: Amount = Field(description="How long that is, in seconds: an hour, or less where less is known.")
    drafting: Drafting = Field(description="What was drafted in that time.")
    output_tokens_per_s: Amount = Field(description="Tokens that the target produced, per second.")
    learned_tokens_per_s: Amount = Field(description="Tokens that the corpus took, per second.")


class Period(_Part):
    """What happened between two moments. Counts are those of the period."""

    begins_at: Moment = Field(description="Seconds since 1970.")
    ends_at: Moment = Field(description="Seconds since 1970.")
    steps: Count = Field(description="Steps of sequences.")
    committed: Count = Field(description="Tokens that the target produced.")
    hits: Count = Field(description="Steps of sequences in which something drafted was verified.")
    drafted: Count = Field(description="Draft tokens that the target verified.")
    accepted: Count = Field(description="Draft tokens that it kept.")
    timeouts: Count = Field(description="Steps of engines whose drafts came too late.")
    learned_tokens: Count = Field(description="Tokens that the corpus took.")
    hit_rate: Share | None = Field(description="hits / steps.")
    acceptance: Share | None = Field(description="accepted / drafted.")
    tokens_per_step: Amount | None = Field(description="committed / steps.")
    corpus_tokens: Count = Field(description="Tokens remembered at its end.")
    memory_bytes: Count = Field(description="Memory of the namespace at its end, in bytes.")


class Tally(_Part):
    """Draft tokens of one kind."""

    drafted: Count = Field(description="Draft tokens that the target verified.")
    accepted: Count = Field(description="Draft tokens that it kept.")
    acceptance: Share | None = Field(description="accepted / drafted.")


class PositionTally(Tally):
    """Draft tokens at one position."""

    position: int = Field(
        ge=1, description="Place in the draft, from 1; in a tree the depth. 129 stands for all from there on."
    )
    accepted_share_of_drafts: Share | None = Field(
        description="accepted / hits of the namespace: how many drafts were right up to here."
    )


class LengthTally(Tally):
    """Draft tokens found by matches of one length."""

    match_length: Count = Field(
        description="How many of the context's last tokens were found, in tokens. 64 stands for 64 and more."
    )


class SourceTally(Tally):
    """Draft tokens from one source."""

    source: Literal["corpus", "local"] = Field(
        description="corpus: finished requests, and what others that run have produced. "
        "local: the running request's own text."
    )


class AgeTally(Tally):
    """Draft tokens from text of about one age."""

    least_tokens: Count = Field(
        description="Least age: tokens that came after it, in the corpus or in the running request."
    )
    most_tokens: Count | None = Field(description="Greatest age, in tokens. Null: no bound.")


class Age(_Part):
    """How old the text is that drafts came from."""

    median_tokens: Count | None = Field(
        description="Half of the accepted draft tokens came from text of at most this age, in tokens; "
        "the upper bound of its bin."
    )
    bins: list[AgeTally] = Field(
        description="By age, youngest first; those without a draft token at both ends are left out."
    )


class PathProbBin(_Part):
    """Draft tokens with about the same path probability: the product of `accept_prob` from the root to the token."""

    least_path_prob: Share = Field(description="Lower bound of the path probability.")
    most_path_prob: Share = Field(description="Upper bound of the path probability, exclusive.")
    drafted: Count = Field(description="Draft tokens that the target verified.")
    predicted: Share | None = Field(description="Mean path probability.")
    acceptance: Share | None = Field(description="Share of them that was accepted.")


class Calibration(_Part):
    """How well path probabilities predict acceptance."""

    error: Share | None = Field(
        description="Mean of |predicted - acceptance| over all draft tokens; 0 is a perfect prediction."
    )
    bins: list[PathProbBin] = Field(
        description="20 equal bins of path probability, lowest first, without those that have no draft token."
    )


class CorpusReport(_Part):
    """How full the corpus is and what became of it."""

    tokens: Count = Field(description="Remembered now, in tokens, separators of requests included.")
    requests: Count = Field(description="Remembered now; pieces of very long ones count each.")
    capacity_tokens: Count | None = Field(default=None, description="The most that it remembers, in tokens.")
    occupancy: Share | None = Field(default=None, description="tokens / capacity_tokens, 1 at most.")
    learned_tokens: Count | None = Field(
        default=None, description="Ever taken, in tokens, those overwritten or forgotten since included."
    )
    turnovers: Amount | None = Field(
        default=None, description="How often it was written through: learned_tokens / capacity_tokens."
    )
    turnover_s: Amount | None = Field(
        default=None, description="Seconds until all is overwritten at the pace of late. Null: not in sight."
    )
    waiting_tokens: Count | None = Field(default=None, description="Learned but not draftable yet, in tokens.")
    forgotten_requests: Count | None = Field(
        default=None, description="Forgotten by request; pieces of long ones count each."
    )
    merges: Count | None = Field(default=None, description="Times that finished requests became draftable.")
    base_merges: Count | None = Field(default=None, description="Merges into the large order.")
    full_builds: Count | None = Field(default=None, description="Times that everything was sorted from scratch.")


class DurationBin(_Part):
    """Durations of about the same length."""

    least_s: Amount = Field(description="Seconds.")
    most_s: Amount | None = Field(description="Seconds, itself in this bin. Null: no bound.")
    count: Count = Field(description="How many took so long.")


class LatencyReport(_Part):
    """How long something took. Quantiles are upper bounds of bins, each 1.41 times the one before."""

    count: Count = Field(description="How often it was measured.")
    mean_s: Amount | None = Field(default=None, description="Seconds.")
    p50_s: Amount | None = Field(default=None, description="Half of them took at most so many seconds.")
    p90_s: Amount | None = Field(default=None, description="90 of 100 took at most so many seconds.")
    p99_s: Amount | None = Field(default=None, description="99 of 100 took at most so many seconds.")
    longest_s: Amount | None = Field(default=None, description="Seconds.")
    bins: list[DurationBin] = Field(description="Shortest first; empty ones at both ends are left out.")


class Clients(_Part):
    """What the engines' clients counted, over all that ever were."""

    timeouts: Count = Field(description="Steps of engines that went without drafts because the answer came too late.")
    dropped: Count = Field(description="Answers that came too late and were dropped.")
    resyncs: Count = Field(description="Sequences that were told again because the service had lost them.")
    reconnects: Count = Field(description="Connections that were made again.")


class PassageReport(_Part):
    """A piece of remembered text that drafts came from. It is users' text."""

    accepted: Count = Field(description="Draft tokens from it that were accepted.")
    age_tokens: Count = Field(description="How many tokens were remembered after it.")
    tokens: list[Count] = Field(description="Token ids.")
    text: str | None = Field(default=None, description="The same as text, where a tokenizer was at hand.")


class ModelReport(_Part):
    """What is served."""

    name: str = Field(description="The model's name.")
    tokenizer: str = Field(description="A fingerprint of the tokenizer.")
    adapter: str = Field(description="The name of a LoRA adapter; empty without one.")
    vocabulary_size: Count | None = Field(description="Token ids are below this. Null: not known.")


class Tables(_Part):
    """What the counters of a namespace say."""

    drafting: Drafting = Field(description="Since the counters began, restarts included where snapshots are kept.")
    by_position: list[PositionTally] = Field(description="By place in the draft, up to the last one used.")
    by_match_length: list[LengthTally] = Field(description="By match length; those without a draft token are left out.")
    by_source: list[SourceTally] = Field(description="By where the draft token was found.")
    age: Age = Field(description="How old the text is that drafts came from.")
    calibration: Calibration = Field(description="Whether odds hold what they promise.")


class NamespaceReport(Tables):
    """One isolated corpus and the drafting from it. A snapshot tells less of it than a running service."""

    name: str = Field(description="The namespace; for a snapshot the file's name.")
    model: ModelReport | None = Field(default=None, description="What is served from it. Null: not known.")
    recent: Recent | None = Field(default=None, description="Of late. Null: not known, or only just begun.")
    over_time: list[Period] | None = Field(default=None, description="Periods without gaps, oldest first.")
    corpus: CorpusReport = Field(description="How full the corpus is and what became of it.")
    draft_latency: LatencyReport | None = Field(
        default=None, description="Of one message of an engine: drafts for its whole batch."
    )
    merge_latency: LatencyReport | None = Field(
        default=None, description="Of the maintainer's refreshes in which something was done."
    )
    clients: Clients | None = Field(default=None, description="What the engines' clients counted.")
    memory_bytes: Count | None = Field(default=None, description="Memory of the namespace, in bytes.")
    streams: Count | None = Field(default=None, description="Engines that draft from it now.")
    sequences: Count | None = Field(default=None, description="Sequences that run in it now.")
    duplicates: Count | None = Field(
        default=None, description="Texts that were offered again after they had been learned."
    )
    passages: list[PassageReport] | None = Field(
        default=None,
        description="The texts that drafts came from most, most productive first. Null unless asked for.",
    )


class SharedLog(_Part):
    """The log of finished requests that replicas share, as this one sees it."""

    is_connected: bool = Field(description="Whether it can be reached now.")
    published_tokens: Count = Field(description="Written to it by this replica, in tokens.")
    consumed_tokens: Count = Field(description="Learned from it, in tokens.")
    duplicates: Count = Field(description="Requests read from it that were known already.")
    dropped_tokens: Count = Field(description="Never written because it was too slow or away, in tokens.")
    malformed: Count = Field(default=0, description="Entries that were skipped because they make no sense.")
    gaps: Count = Field(
        default=0, description="Times that entries may have been missed: trimmed before they were read, or lost."
    )
    errors: Count = Field(description="Failed calls.")
    lag_entries: Count = Field(description="Entries not read yet.")
    lag_s: Amount = Field(description="How far behind its end this replica reads, in seconds.")


class ServiceReport(_Part):
    """The service that made the report."""

    version: str = Field(description="Version of ssd-drafter.")
    started_at: Moment = Field(description="Seconds since 1970.")
    uptime_s: Amount = Field(description="Seconds.")
    memory_bytes: Count = Field(description="Resident memory of the whole process, in bytes.")
    refused: Count = Field(description="Requests and streams that were refused.")
    log: SharedLog | None = Field(description="Null: it runs without one.")


class Report(_Part):
    """What drafting was worth so far."""

    schema_version: Literal[2] = Field(description="Version of this schema.")
    taken_at: Moment = Field(description="Seconds since 1970; of a snapshot, when the file was written.")
    service: ServiceReport | None = Field(description="Null: the report was made from a snapshot.")
    total: Drafting = Field(description="Over all namespaces of this report.")
    namespaces: list[NamespaceReport] = Field(description="By name.")


def schema_json() -> str:
    """The JSON schema of a report, as docs/report.schema.json holds it."""
    schema = Report.model_json_schema(mode="serialization")
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


if __name__ == "__main__":
    print(schema_json(), end="")
