"""Read single records. Removed as soon as containers call `read_records`."""

from __future__ import annotations

from drafter_service.ingest.answers import Found, token_ids
from drafter_service.ingest.documents import RecordError
from drafter_service.ingest.formats import FIELDS as KNOWN
from drafter_service.ingest.formats import is_conversation, read_records
from drafter_service.ingest.sessions import Record

__all__ = ["KNOWN", "Found", "find_outputs", "is_conversation", "token_ids"]


def find_outputs(record: object, fields: tuple[str, ...] = ()) -> list[Found]:
    """Return all outputs of a record, at least one. Raises RecordError if there is no output."""
    reads = list(read_records([Record(record, "")], fields))
    found = [output for read in reads for output in read.outputs]
    if not found:
        raise RecordError(next((reason for read in reads for reason in read.skipped), "no output"))
    return found
