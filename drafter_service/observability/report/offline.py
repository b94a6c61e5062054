"""What a snapshot tells, to a report."""

from __future__ import annotations

from pathlib import Path

from drafter_service.observability.report.schema import SCHEMA_VERSION, CorpusReport, NamespaceReport, Report
from drafter_service.observability.report.tallies import copy_of, tables
from ssd.corpus.ring import MIN_CAPACITY
from ssd.corpus.sections import SnapshotError, read_sections
from ssd.corpus.snapshot import DEPTH, SIZE, load


def stats_report(path: Path, name: str | None = None) -> Report:
    """The report of a snapshot; its namespace is called as the file if no name is given.

    Raises SnapshotError for a file that cannot be used.
    """
    facts = read_sections(path).get("facts")
    if facts is None or len(facts) <= SIZE:
        raise SnapshotError(f"{path}: was not written by a drafter; give the file of a namespace")
    corpus, stats, _ = load(path, max(MIN_CAPACITY, int(facts[SIZE])), int(facts[DEPTH]))
    namespace = NamespaceReport(
        name=path.stem if name is None else name,
        corpus=CorpusReport(tokens=corpus.tokens, requests=corpus.requests),
        **dict(tables(copy_of(stats.counters))),
    )
    corpus.close()
    return Report(
        schema_version=SCHEMA_VERSION,
        taken_at=path.stat().st_mtime,
        service=None,
        total=namespace.drafting,
        namespaces=[namespace],
    )
