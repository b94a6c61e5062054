"""Parquet files, a batch of rows at a time. Columns of token ids are never converted to Python numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from drafter_service.ingest.documents import Chunk, RecordError
from drafter_service.ingest.files import Opened
from drafter_service.ingest.reading import Reading
from drafter_service.ingest.records import KNOWN
from ssd.errors import missing_extra

MAX_ROWS = 4096
NO_COLUMNS = "no known column; name one with --field"


def check_parquet() -> None:
    """Raise UserError with the package to install if Parquet files cannot be read."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise missing_extra("Parquet files need pyarrow", "parquet") from None


def read_parquet(opened: Opened, reading: Reading) -> Iterator[Chunk]:
    """Yield chunks of rows. Raises RecordError if there is no known column."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(opened.data, pre_buffer=False, buffer_size=reading.block_bytes)
    wanted = {field.split(".")[0] for field in reading.fields} | set(reading.fields) or KNOWN
    columns = [name for name in file.schema_arrow.names if name in wanted]
    if not columns:
        raise RecordError(NO_COLUMNS)
    row, rows = 0, max(1, file.metadata.num_rows)
    for index in range(file.num_row_groups):
        group = file.metadata.row_group(index)
        row_bytes = max(1, group.total_byte_size // max(1, group.num_rows))
        at_once = min(MAX_ROWS, max(1, reading.block_bytes // row_bytes))
        for batch in file.iter_batches(at_once, row_groups=[index], columns=columns):
            first, row = row, row + batch.num_rows
            items = []
            for number, values in enumerate(zip(*map(_values, batch.columns), strict=True), first + 1):
                items += reading.items_of(dict(zip(columns, values, strict=True)), opened.file, number)
            yield Chunk(items, opened.file.size * row // rows)


def _values(column: Any) -> list[Any]:
    """Return the values of a column, lists of integers as arrays."""
    import pyarrow as pa

    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type) or column.values.null_count:
        return list(column.to_pylist())
    values, offsets = column.values.to_numpy(), column.offsets.to_numpy().tolist()
    return [values[first:end] for first, end in pairwise(offsets)]
