"""JSON in all layouts of logs: a value on each line, arrays, concatenated values; NaN, prefixes, server-sent events."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import orjson

from drafter_service.ingest.chats import DECODER, decoded
from drafter_service.ingest.documents import RecordError
from drafter_service.ingest.files import Opened
from drafter_service.ingest.formats import read_records
from drafter_service.ingest.reading import Reading
from drafter_service.ingest.sessions import Record, Unread

LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
MAX_JSON = 32 << 20
"""Maximum length of a line in bytes, or of a value on several lines in characters; longer lines are skipped. A request
of a million tokens has about 7 MB, 12 MB with its text."""
NOT_JSON = "not JSON"
NOT_UTF8 = "text that is not UTF-8; convert it, such as with iconv -f LATIN1 -t UTF-8"
JSON_TOO_LONG = f"JSON longer than {MAX_JSON >> 20} MiB"
JSON_CUT = "JSON that is cut off"
IGNORED = re.compile(rb"\s*(#|//|:|(event|id|retry):|(data:\s*(\[DONE\]\s*)?)?$)")
"""Blank lines, comments, and lines of server-sent events that have no JSON."""
OBJECT = re.compile(r'\{(?=\s*")')
ARRAY = re.compile(r"\s*\[(?=\s*[\[{])")
BETWEEN = re.compile(r"[\s,]*")
CUT_MARGIN = 12
"""Number of last characters of a text in which an error may be caused by its end."""
KEPT_CHARS = 200
"""Number of characters of the window that are kept before the position: the indentation of its line."""


def layout_of(head: bytes, suffix: str, share: float) -> str | None:
    """Return "JSON lines" or "JSON" by the first bytes of a file; None for other content.

    share: of the lines, those that must have an object if the first has none.
    """
    lines = [line for line in head.split(b"\n") if not IGNORED.match(line)]
    text = head[head.index(lines[0]) :].decode(errors="replace").lstrip() if lines else ""
    is_single = len(lines) == 1 and suffix not in LINES_SUFFIXES
    if text.startswith("{") and not is_single and values_of(lines[0]):
        return "JSON lines"
    start = re.match(r"[\[\s]*", text).end()  # type: ignore[union-attr]  # always matches
    if text[start : start + 1] == "{":
        try:
            _, end = DECODER.raw_decode(text, start)
            if text[end:].lstrip()[:1] in tuple(",{[]") or not text[end:].strip():
                return "JSON"
        except (ValueError, RecursionError) as error:
            if _is_cut(error, text) and OBJECT.match(text, start):
                return "JSON lines" if start == 0 and suffix in LINES_SUFFIXES else "JSON"
    if (lines and sum(map(bool, map(values_of, lines))) >= share * len(lines)) or suffix in LINES_SUFFIXES:
        return "JSON lines"
    return "JSON" if suffix == ".json" else None


# --- Lines


def read_json_lines(opened: Opened, reading: Reading) -> Iterator[Record]:
    """Yield the values of each line. Elements of arrays are records, except those of lists of messages."""
    for first, block in line_blocks(opened, reading, reading.block_bytes, MAX_JSON, JSON_TOO_LONG):
        for number, line in enumerate(block.removesuffix(b"\n").split(b"\n"), first):
            place = f"{opened.file.name}:{number}"
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError:
                if IGNORED.match(line):
                    continue
                value = values_of(line)
                if not value:
                    is_cut = number == first + block.count(b"\n") and line.lstrip()[:1] in (b"{", b"[")
                    value = Unread(JSON_CUT if is_cut else NOT_JSON, b"{" in line and not is_cut)
            if type(value) is not list or _is_record(value):
                yield Record(value, place)
            else:
                for index, element in enumerate(value, 1):
                    yield Record(element, f"{place}.{index}" if len(value) > 1 else place)


def line_blocks(opened: Opened, reading: Reading, size: int, most: int, too_long: str) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of about `size` bytes of whole lines, each after the number of its first line.

    Lines of more than about `most` bytes are skipped, and counted under the reason `too_long`.
    """
    stream, number = opened.data, 1
    while block := stream.read(size):
        rest = b"" if block.endswith(b"\n") else stream.readline(most)
        is_too_long = len(rest) == most and not rest.endswith(b"\n")
        block = block[: block.rfind(b"\n") + 1] if is_too_long else block + rest
        opened.advance()
        if block:
            yield number, block
        number += block.count(b"\n")
        if is_too_long:
            while (rest := stream.readline(most)) and not rest.endswith(b"\n"):
                pass
            reading.faults.record(too_long, f"{opened.file.name}:{number}")
            number += 1


def values_of(line: bytes) -> object:
    """Return the object, the list of objects, or the array in a line as Python's json reads it; [] if there is none.

    Objects may have text before and after them. Nothing is read of one that is not complete, nor what follows it.
    """
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return []
    with suppress(ValueError, RecursionError):
        if start := ARRAY.match(text):
            return decoded(text, start.end() - 1)[0]
    values: list[object] = []
    end = 0
    with suppress(ValueError, RecursionError):
        while start := OBJECT.search(text, end):
            value, end = decoded(text, start.start())
            values.append(value)
    return values[0] if len(values) == 1 else values


def _is_cut(error: Exception, text: str) -> bool:
    """Return whether a value may be incomplete only because the text ends."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - CUT_MARGIN


def is_unicode(text: str) -> bool:
    """Return whether a text that was decoded with "surrogateescape" has no invalid bytes."""
    with suppress(UnicodeEncodeError):
        return text.isascii() or bool(text.encode())
    return False


def _is_record(array: list[object]) -> bool:
    """Return whether an array is one record: a list of messages, or of neither objects nor lists."""
    first = array[0] if array else {}
    is_message = isinstance(first, dict) and ("role" in first or {"from", "value"} <= first.keys())
    return is_message or not isinstance(first, dict | list)


# --- Values on several lines


class JsonText:
    """The values of JSON text, of which a window is in memory: at most one value that is read, and a block.

    Elements of arrays are records, except those of lists of messages. If the file is one object that is not a record,
    is cut off or too long, the objects in its lists are records.
    """

    def __init__(self, opened: Opened, reading: Reading) -> None:
        self._opened = opened
        self._reading = reading
        # Invalid bytes must not make other values unreadable.
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._text = ""
        self._at = 0
        self._number = 0
        self._is_cut = False

    def __iter__(self) -> Iterator[Record]:
        while self._next():
            yield from self._list(0)
        if self._is_cut:
            yield self._unread(JSON_CUT, breaks_streams=False)

    def _list(self, depth: int) -> Iterator[Record]:
        """Yield the records up to the end of the list here, or of the file."""
        while (char := self._next()) not in ("]", ""):
            self._forget()
            if char == "[" and not self._begins_record():
                self._at += 1
                yield from self._list(depth + 1)
                continue
            is_only = depth == self._number == 0 and char == "{"
            try:
                value = self._value()
            except RecordError as problem:
                reason, line = str(problem), self._text[self._at : self._at + KEPT_CHARS].partition("\n")[0]
                if reason == JSON_CUT:
                    self._is_cut = True
                elif is_only and reason == JSON_TOO_LONG:
                    yield from self._object()
                    if self._number == 0:
                        yield self._unread(reason, breaks_streams=False)
                    continue
                elif reason != NOT_JSON or not IGNORED.match(line.encode(errors="replace")):
                    yield self._unread(reason, breaks_streams="{" in line)
                if is_only and reason != NOT_JSON:
                    yield from self._object()
                elif reason != NOT_UTF8:
                    self._skip_line()
            else:
                yield from self._only(value) if is_only and not self._next() else [self._record(value)]
        self._at += 1
        self._is_cut |= depth > 0 and not char

    def _only(self, value: Any) -> Iterator[Record]:
        """Yield the only object of a file; or the elements of its list of objects, if only they can be records."""
        record = self._record(value)
        lists = [each for each in value.values() if isinstance(each, list) and each and not _is_record(each)]
        if len(lists) != 1 or any(read.outputs for read in read_records([record], self._reading.fields)):
            yield record
        else:
            self._number = 0
            yield from map(self._record, lists[0])

    def _object(self) -> Iterator[Record]:
        """Yield what is complete in the object here: elements of its lists, and lists of messages as a whole."""
        self._at += 1
        while (char := self._next()) == '"':
            self._forget()
            try:
                self._value()
                if self._next() != ":":
                    return
                self._at += 1
                if (char := self._next()) != "[":
                    self._value()
                    continue
            except RecordError:
                if char != "{":
                    return
                yield from self._object()
                continue
            is_record = self._begins_record()
            self._at += 1
            if not is_record:
                yield from self._list(1)
            elif (messages := [record.value for record in self._list(1)]) and isinstance(messages[0], dict):
                yield self._record(messages)
        self._at += char == "}"

    def _record(self, value: object) -> Record:
        self._number += 1
        return Record(value, f"{self._opened.file.name}:{self._number}")

    def _unread(self, reason: str, *, breaks_streams: bool) -> Record:
        return Record(Unread(reason, breaks_streams), f"{self._opened.file.name}:{self._number + 1}")

    # --- The window

    def _next(self) -> str:
        """Skip white space and commas, and return the character after them; "" at the end."""
        while True:
            self._at = BETWEEN.match(self._text, self._at).end()  # type: ignore[union-attr]  # always matches
            if self._at < len(self._text) or not self._read_on():
                return self._text[self._at : self._at + 1]

    def _value(self) -> object:
        """Return the value here, and go to its end. Raises RecordError if it is cut off, too long or not JSON."""
        while True:
            try:
                value, end = decoded(self._text, self._at)
                # A number at the end of the window may have further digits.
                if end < len(self._text) or not isinstance(value, int | float) or not self._read_on():
                    break
            except (ValueError, RecursionError) as error:
                if not _is_cut(error, self._text):
                    raise RecordError(NOT_JSON) from None
                if len(self._text) - self._at > MAX_JSON:
                    raise RecordError(JSON_TOO_LONG) from None
                if not self._read_on():
                    raise RecordError(JSON_CUT) from None
        text, self._at = self._text[self._at : end], end
        if not is_unicode(text):
            raise RecordError(NOT_UTF8)
        return value

    def _begins_record(self) -> bool:
        """Return whether the array here is one record, by its first element."""
        start = self._at
        self._at += 1
        try:
            return self._next() not in ("[", "]", "") and _is_record([self._value()])
        except RecordError:
            return False
        finally:
            self._at = start

    def _forget(self) -> None:
        """Drop the text before the position, except the last characters, once it is most of the window."""
        dropped = self._at - KEPT_CHARS
        if 2 * dropped > len(self._text):
            self._text, self._at = self._text[dropped:], KEPT_CHARS

    def _skip_line(self) -> None:
        """Go to the next line that begins with a value and is not indented more than this one."""
        line = self._text[self._text.rfind("\n", 0, self._at) + 1 : self._at]
        beginning = re.compile(rf"\n[ \t]{{0,{0 if line.strip() else len(line)}}}(?=[\[\]{{])")
        while not (found := beginning.search(self._text, self._at)):
            last = self._text.rfind("\n", max(self._at, len(self._text) - KEPT_CHARS))
            self._at = len(self._text) if last < 0 else last
            self._forget()
            if not self._read_on():
                self._at = len(self._text)
                return
        self._at = found.end()

    def _read_on(self) -> bool:
        """Extend the window, by as much as it has after the position. Return whether there was more to read."""
        data = self._opened.data.read(max(self._reading.block_bytes, len(self._text) - self._at))
        self._opened.advance()
        self._text += self._decode(data, not data)
        return bool(data)
