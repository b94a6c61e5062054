"""All files of a load as batches of documents: the container of a file is detected by its content, and read.

What is neither a known container nor source code by its name is refused.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import NamedTuple

from fsspec.implementations.zip import ZipFileSystem

from drafter_service.ingest.documents import Item, RecordError
from drafter_service.ingest.files import File, Opened
from drafter_service.ingest.formats import read_records
from drafter_service.ingest.json_text import NOT_UTF8, JsonText, layout_of, line_blocks, read_json_lines
from drafter_service.ingest.readers import NO_RESPONSE
from drafter_service.ingest.reading import Reading
from drafter_service.ingest.sessions import AIDER_BEGINS, Record, markdown_chat
from drafter_service.ingest.tables import is_csv, read_arrow, read_csv, read_parquet
from drafter_service.ingest.token_files import read_npy, read_npz, read_snapshot
from ssd.corpus.sections import MAGIC
from ssd.errors import UserError

SOURCE = (
    "ada asm awk bash bat bzl c cc cfg cl clj cmake cpp cs css cu cuh cxx d dart el erl ex exs f f90 fish fs glsl go "
    "gradle groovy h hcl hh hpp hs ini java jl js jsx kt kts less lisp lua m mjs mk ml mm nim nix pas patch php pl pm "
    "proto ps1 py pyi pyx r rb rkt rs s scala scm scss sh sol sql sv svelte swift tcl tf toml ts tsx v vb vhd vim vue "
    "zig zsh"
)
"""Suffixes of source code and configuration, which are learned as text."""
SOURCE_NAMES = frozenset(("dockerfile", "makefile"))
"""Names of such files that have no suffix."""
PROSE = frozenset((".adoc", ".markdown", ".md", ".org", ".rst", ".tex", ".text", ".txt"))
"""Suffixes of prose. Unless such a file begins with JSON, it is a log only if half of its first lines are JSON."""
BY_MAGIC = {
    MAGIC: "snapshot",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\xff\xff\xff\xff": "Arrow",
    b"\x93NUMPY": "npy",
    b"PK\x03\x04": "zip",
}
PIECE_BYTES = 1 << 16
"""Maximum size of a document in bytes. Longer files are split at the end of a line; matches have at most 32 tokens, so
little is lost."""
MAX_TEXT_LINE = 1 << 20
TEXT_TOO_LONG = f"a line of text longer than {MAX_TEXT_LINE >> 20} MiB"
EMPTY = "an empty file"
NO_RECORDS = "a file without records"
SQLITE = "a database of SQLite; export its messages to JSON"
HEADER = "; the first line of a CSV names its columns"
BINARY = "a file that is neither text nor of a known format"
INSPECT = ("_journal/start.json", "_journal/summaries/", "header.json", "summaries.json")
"""Members of Inspect's logs that only repeat facts of the samples in the others."""
NOT_TEXT = (
    "a file that is neither JSON nor a table, nor source code by its name; --text learns all of it, also what the "
    "model did not write"
)
NOTEBOOK = "a notebook, whose outputs are those of programs; export its answers to JSON, or its code to .py"
YAML = "YAML, which is not read; convert it to JSON, or --text learns all of it as text, not only the model's part"
NOTEBOOK_HEAD = re.compile(rb'\s*\{(?=.*"cells"\s*:)(?=.*"(cell_type|nbformat)")', re.DOTALL)
VLLM_LOG = "a log of vLLM, which has prompts but no outputs; record responses too"
VLLM_LINE = re.compile(rb"INFO \d\d-\d\d [^\n]{0,99}Received request \S+:")
CASSETTE = re.compile(rb"(---\s+)?(http_)?interactions:\s")
DOCUMENT = re.compile(rb"(---|%YAML)[^\n]*\n(?!\s*[\[{])")
"""Beginnings of YAML: of recordings of HTTP (VCR), and of other documents."""
REQUESTS_OF_AIDER = b"TO LLM "
"""Beginning of aider's history of requests."""
BATCH_BLOCKS = 8
"""Maximum number of blocks that are read for a batch."""


class Batch(NamedTuple):
    """Items of one or more files, in order."""

    items: list[Item]
    bytes_read: int
    """Bytes of all files so far."""


def read_batches(files: Sequence[File], reading: Reading) -> Iterator[Batch]:
    """Yield the items of all files. Raises only UserError."""
    items: list[Item] = []
    before = size = last = 0
    for file in files:
        for found, position in _read_file(file, reading):
            items += found
            size += sum(item.nbytes for item in found)
            bytes_read = before + min(position, file.size)
            if size >= reading.block_bytes or bytes_read - last >= BATCH_BLOCKS * reading.block_bytes:
                yield Batch(items, bytes_read)
                items, size, last = [], 0, bytes_read
        before += file.size
    for place, _ in reading.requests.values():
        reading.faults.record(NO_RESPONSE, place)
    if len(files) > reading.kinds.total():
        reading.kinds["skipped"] = len(files) - reading.kinds.total()
    yield Batch(items, before)


def _read_file(file: File, reading: Reading) -> Iterator[tuple[list[Item], int]]:
    """Yield documents of a file with the number of its bytes read so far. Raises only UserError."""
    try:
        with Opened(file) as opened:
            kind = kind_of(opened, as_text=reading.as_text)
            reading.kinds[kind] += 1
            skipped, waiting, found = reading.faults.count, len(reading.requests), False
            for items in _read(opened, kind, reading):
                found = found or bool(items)
                yield items, opened.bytes_read
            found = found or len(reading.requests) > waiting
            if opened.problem or (not found and reading.faults.count == skipped):
                raise RecordError(opened.problem or NO_RECORDS)
    except UserError:
        raise
    except RecordError as problem:
        reading.faults.record(str(problem), file.name)
    except Exception as problem:  # File systems, codecs and pyarrow raise many types.
        reading.faults.record(f"a file that cannot be read to its end ({type(problem).__name__})", file.name)


def _read(opened: Opened, kind: str, reading: Reading) -> Iterator[list[Item]]:
    """Yield the documents of each record, member or piece; none for a record that is skipped."""
    if kind == "zip":
        archive = ZipFileSystem(opened.seekable())
        reading = replace(reading, kinds=Counter())
        members = archive.find("", detail=True)
        for path, info in members.items():
            if not path.startswith(("__MACOSX/", *(INSPECT if INSPECT[0] in members else ()))):
                opened.bytes_read = info["header_offset"]
                file = File(archive, path, f"{opened.file.name}/{path}", info["size"])
                for items, _ in _read_file(file, reading):
                    yield items
    elif kind in RECORDS:
        for read in read_records(RECORDS[kind](opened, reading), reading.fields, reading.requests):
            note = HEADER if kind == "CSV" and not read.format else ""
            yield reading.items_of(read._replace(skipped=[reason + note for reason in read.skipped]))
    else:
        for item in map(reading.named, DOCUMENTS[kind](opened, reading)):
            reading.sample(kind, [item])
            yield [item]


# --- Containers


def kind_of(opened: Opened, *, as_text: bool = False) -> str:
    """Return the container of a file. Raises RecordError for a file that is empty or not known."""
    head, suffix = opened.head, opened.file.suffix
    kind = next((kind for magic, kind in BY_MAGIC.items() if head.startswith(magic)), None)
    if kind == "zip":
        return _kind_of_archive(zipfile.ZipFile(opened.seekable()).namelist())
    if kind is not None:
        return kind
    if not head.strip():
        raise RecordError(opened.problem or EMPTY)
    if b"\0" in head:
        raise RecordError(SQLITE if head.startswith(b"SQLite format 3") else BINARY)
    if not as_text and (suffix == ".ipynb" or NOTEBOOK_HEAD.match(head)):
        raise RecordError(NOTEBOOK)
    if as_text or suffix[1:] in SOURCE.split() or PurePosixPath(opened.file.path).stem.lower() in SOURCE_NAMES:
        return "text"
    is_yaml = suffix in (".yaml", ".yml") or CASSETTE.match(head) or (suffix not in PROSE and DOCUMENT.match(head))
    if is_yaml and head.lstrip()[:1] not in (b"{", b"["):
        raise RecordError(YAML)
    if head.startswith(REQUESTS_OF_AIDER):
        raise RecordError(NOT_TEXT)
    if layout := layout_of(head, suffix, share=0.5 if suffix in PROSE else 0.1):
        return layout
    if suffix in (".csv", ".tsv") or is_csv(head):
        return "CSV"
    if AIDER_BEGINS.encode() in head:
        return "Markdown chat"
    raise RecordError(VLLM_LOG if VLLM_LINE.search(head) else NOT_TEXT)


def _kind_of_archive(names: list[str]) -> str:
    if any(name.startswith(("[Content_Types]", "META-INF/")) or name.endswith("data.pkl") for name in names):
        raise RecordError(BINARY)  # Documents of office programs, Java and Python packages, weights of PyTorch.
    return "npz" if any(name.endswith(".npy") for name in names) else "zip"


def _read_markdown(opened: Opened, _: Reading) -> Iterator[Record]:
    lines = io.TextIOWrapper(opened.data, "utf-8", "replace")
    for number, value in enumerate(markdown_chat(lines), 1):
        yield Record(value, f"{opened.file.name}:{number}")


def _read_text(opened: Opened, reading: Reading) -> Iterator[Item]:
    """Yield a document for each piece; its place ends with the number of its first line."""
    for first, piece in line_blocks(opened, reading, PIECE_BYTES, MAX_TEXT_LINE, TEXT_TOO_LONG):
        place = f"{opened.file.name}:{first}"
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            reading.faults.record(NOT_UTF8, place)
            continue
        if text.strip():
            yield Item(place, None, text)


RECORDS: dict[str, Callable[[Opened, Reading], Iterable[Record]]] = {
    "JSON lines": read_json_lines,
    "JSON": JsonText,
    "CSV": read_csv,
    "Parquet": read_parquet,
    "Arrow": read_arrow,
    "Markdown chat": _read_markdown,
}
"""Readers of containers of records, which formats interpret."""
DOCUMENTS: dict[str, Callable[[Opened, Reading], Iterator[Item]]] = {
    "text": _read_text,
    "npy": read_npy,
    "npz": read_npz,
    "snapshot": read_snapshot,
}
"""Readers of containers whose contents are documents."""
