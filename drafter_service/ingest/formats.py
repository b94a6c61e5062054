"""Outputs and their prompts in records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from drafter_service.ingest.documents import RecordError
from drafter_service.ingest.records import KNOWN as FIELDS
from drafter_service.ingest.records import Found, find_outputs

__all__ = ["FIELDS", "Found", "Read", "Record", "is_markdown_chat", "markdown_chat", "read_records"]


class Record(NamedTuple):
    """A decoded JSON value or a row of a table."""

    value: object
    place: str


class Read(NamedTuple):
    """What a record contains."""

    record: Record
    format: str
    outputs: list[Found]
    skipped: list[str]


def read_records(records: Iterable[Record], fields: tuple[str, ...] = ()) -> Iterator[Read]:
    """Yield what records contain."""
    for record in records:
        try:
            value = {"messages": record.value} if isinstance(record.value, list) else record.value
            yield Read(record, "record", find_outputs(value, fields), [])
        except RecordError as problem:
            yield Read(record, "", [], [str(problem)])


def is_markdown_chat(head: str) -> bool:
    """Return whether a text is a chat history of aider."""
    return "# aider chat started at" in head


def markdown_chat(lines: Iterable[str]) -> Iterator[object]:
    """Yield the messages of a chat history of aider."""
    yield {"completion": "".join(lines)}
