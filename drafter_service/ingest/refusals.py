"""Fields that the user names, and the reasons for which records of no known format are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from shlex import quote

import numpy as np

from drafter_service.ingest import answers
from drafter_service.ingest.answers import Found, conversation, outputs_of
from drafter_service.ingest.chats import Chat, chat_of, is_chat, parsed, role_of
from drafter_service.ingest.documents import Part, RecordError
from drafter_service.ingest.readers import NOT_SEARCHED, Value
from drafter_service.ingest.sessions import Read, Record

LIKELY = re.compile("answer|output|respon|complet|generat|predict|solution|reply|result", re.IGNORECASE)
"""Names of fields that are suggested for --field."""
WORDS = re.compile(r"(?!\d{4}-\d\d-\d\d)[\W\d_]*[^\W\d_]")
"""The beginning of a text that is neither a number nor a time."""
NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,39}")
"""Names of fields that messages repeat. Others may be texts of users."""
NO_FORMAT = "no known format"
NO_FIELD = "a field of --field is missing, or neither text, messages nor token ids"
MAX_NAMES = 12
"""Names of fields in a reason."""


def read_fields(record: Record, fields: tuple[str, ...]) -> Iterator[Read]:
    """Yield the outputs in the last of the fields that the user names, with the prompt in the others."""
    skipped: list[str] = []
    found: list[Found] = []
    *before, outputs = ([*_reached(record.value, field.replace("[]", ""))] for field in fields)
    prompt = _joined([value for values in before for value in values])
    for value in outputs if all(before) else ():
        body = answers.body_of(value)
        if is_chat(body):
            found += conversation(body, record.value, skipped, prompt) or []
        elif body is not value or not isinstance(value, dict) or role_of(value) is not None:
            found += [Found(output, prompt) for output in outputs_of(body, skipped)]
    yield Read(record, "--field", found, skipped) if found else Read(record, "", [], [NO_FIELD + _names(record.value)])


def _reached(value: object, path: str) -> Iterator[object]:
    """Yield what is at a path such as "choices.0.text", or "choices.text" for the texts of all elements."""
    value = parsed(value) if path else value
    name, _, rest = path.partition(".")
    if not path:
        yield value
    elif isinstance(value, dict) and (path in value or name in value):
        yield from _reached(value[path], "") if path in value else _reached(value[name], rest)
    elif isinstance(value, dict) and "*" in name:
        for key in value:
            if fnmatchcase(key, name):
                yield from _reached(value[key], rest)
    elif isinstance(value, list):
        for element in value[int(name) : int(name) + 1] if name.isdecimal() else value:
            yield from _reached(element, rest if name.isdecimal() else path)


def _joined(values: list[object]) -> Part | Chat | None:
    """Return the parts of a prompt as one. Raises RecordError for parts that are of different kinds."""
    if len(values) == 1 and (chat := chat_of(values[0])) is not None:
        return chat
    parts = [answers.part_of(value) for value in values]
    texts = [part for part in parts if isinstance(part, str)]
    tokens = [part for part in parts if isinstance(part, np.ndarray)]
    if max(len(texts), len(tokens)) < len(parts):
        raise RecordError(NO_FIELD)
    return "\n".join(texts) if texts else np.concatenate(tokens) if tokens else None


# --- Refusals


def refusal(record: Value, formats: Mapping[str, str], known: Iterable[str]) -> str:
    """Return why a record is not read, with the names of its fields but without any of its values.

    formats: the fields of each format, as in its row of the table; known: names of all known fields.
    """
    near = record.keys() | {name for field in record for name in get_close_matches(field, known, 1, 0.75)}
    rows = [(share(fields, near) * share(fields.split()[0], near), name) for name, fields in formats.items() if fields]
    nearness, nearest = max(reversed(rows), key=lambda row: row[0])
    needs = ", ".join(" or ".join(field.split("|")[:3]) for field in formats[nearest].split())
    shown = f"; the nearest format is {nearest} ({needs})" if nearness else ""
    return NO_FORMAT + _names(record) + shown + _advice(record)


def share(fields: str, names: Iterable[str]) -> float:
    """Return the share of a format's fields that are among the names: 1 if a record with these may have it."""
    needed = fields.split()
    return sum(any(name in names for name in field.split("|")) for field in needed) / max(len(needed), 1)


def _advice(record: Value) -> str:
    """Return the --field that may read a record; "" if no field has a text and the name of an output."""
    # Events and turns have texts of users and tools, too.
    is_turn = record.get("source", record.get("speaker")) in ("agent", "human", "system", "user")
    if {"type", "timestamp"} <= record.keys() or is_turn:
        return ""
    texts = dict(_texts_in(record, ""))
    likely = [path for path, text in texts.items() if LIKELY.search(path) and WORDS.match(text)]
    if not likely:
        return ""
    path = max(likely, key=lambda path: (" " in texts[path], len(texts[path])))
    prompt = next((f"--field {name} " for name in answers.PROMPTS if isinstance(record.get(name), str)), "")
    return f"; if {path} is an output, give {prompt}--field {quote(path)}"


def _texts_in(record: Value, before: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of a record and of the objects in it that may be outputs, or the first of a list, by path."""
    for name, value in record.items():
        value, path = value[0] if isinstance(value, list) and value else value, f"{before}{name}"
        if not NAME.fullmatch(name) or name in answers.PROMPTS or NOT_SEARCHED.search(name):
            continue
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, dict) and not before and role_of(value) is None:
            yield from _texts_in(value, f"{path}.")


def _names(record: object) -> str:
    names = sorted(name for name in record if isinstance(name, str)) if isinstance(record, dict) else []
    shown = [name for name in names if NAME.fullmatch(name)][:MAX_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f" in a record with the fields {', '.join(shown)}{more}" if shown else ""
