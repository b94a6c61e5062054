"""Fields that the user names, and the reasons for which records of no known format are refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import islice
from shlex import quote

import numpy as np

from drafter_service.ingest import answers
from drafter_service.ingest.answers import Found, conversation, outputs_of
from drafter_service.ingest.chats import Chat, chat_of, is_chat, parsed, role_of
from drafter_service.ingest.documents import Part, RecordError
from drafter_service.ingest.readers import NOT_SEARCHED, Value
from drafter_service.ingest.sessions import Read, Record

LIKELY = re.compile("answer|output|respon|complet|generat|predict|solution|reply|result", re.IGNORECASE)
"""Names of fields that are suggested for --field before others."""
UNLIKELY = re.compile(
    "context|truth|correct|label|time|(^|_)(date|ref|tests?|intent|human|user|system)(_|$)|scor|grad|rating|metric|error|finish"
    "|stop_|status|title|url|path$|uuid|hash|commit|version|name$|type$|passage|document|source|instruct|descri|feedback",
    re.IGNORECASE,
)
"""Names of fields that are never suggested, beside those in which no outputs are searched."""
WORDS = re.compile(r"(?!\d{4}-\d\d-\d\d)[\W\d_]*[^\W\d_]")
"""The beginning of a text that is neither a number nor a time."""
NUMBER = re.compile(r"\d+")
NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,39}")
"""Names of fields that messages repeat. Others may be texts of users."""
NO_FORMAT = "no known format"
NO_FIELD = "a field of --field is missing, or neither text, messages nor token ids"
LONG = 40
"""Length of texts of several words that may be outputs, whatever the name of their field."""
MAX_NAMES = 12
"""Names of fields in a reason; elements of a list or an object in which a field to suggest is searched."""


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
    """Return the --field that may read a record; "" if no field is likely to have an output, or several may."""
    lengths: dict[str, int] = {}
    for path, text in texts_in(record, ""):
        if WORDS.match(text):
            lengths[path] = max(len(text) if " " in text else 0, lengths.get(path, 0))
    likely = [path for path in lengths if LIKELY.search(path)]
    others = [path for path, length in lengths.items() if length > LONG]
    if len(others) == 1 and not any(lengths[path] for path in likely):  # The likely ones are words, such as "passed".
        likely = others
    # Events and turns have texts of users and tools, too.
    is_turn = record.get("source", record.get("speaker")) in ("agent", "human", "system", "user")
    if not likely or {"type", "timestamp"} <= record.keys() or is_turn:
        return ""
    path = max(likely, key=lambda path: (LIKELY.search(path.rpartition(".")[2]) is not None, lengths[path]))
    prompt = next((f"--field {name} " for name in answers.PROMPTS if isinstance(record.get(name), str)), "")
    return f"; if {path} is an output, give {prompt}--field {quote(path)}"


def _names(record: object) -> str:
    names = sorted(name for name in record if isinstance(name, str)) if isinstance(record, dict) else []
    shown = [name for name in names if NAME.fullmatch(name)][:MAX_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f" in a record with the fields {', '.join(shown)}{more}" if shown else ""


def texts_in(value: object, path: str, depth: int = 4) -> Iterator[tuple[str, str]]:
    """Yield the texts in a value that may be outputs, each after its path, in which "*" stands for keys and numbers."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for element in value[:MAX_NAMES]:
            yield from texts_in(element, path.removesuffix("[]") + "[]", depth)
    elif isinstance(value, dict) and depth and (depth == 4 or role_of(value) is None):
        kinds = {type(inner) for inner in value.values()}
        keys = sum(NUMBER.search(name) is not None or not NAME.fullmatch(name) for name in value)
        is_keyed = len(kinds) == 1 and keys >= len(value) * (1 if str in kinds else 0.5)
        numbered = Counter(NUMBER.sub("*", name) for name in value)
        for name, inner in islice(value.items(), MAX_NAMES if is_keyed else None):
            is_readable = NAME.fullmatch(name) and name not in answers.PROMPTS
            is_output = name == "judgment" or not (NOT_SEARCHED.search(name) or UNLIKELY.search(name))
            if is_keyed or (is_readable and is_output):
                pattern = NUMBER.sub("*", name)
                shown = "*" if is_keyed else pattern if numbered[pattern] > 1 else name
                yield from texts_in(inner, f"{path}.{shown}" if path else shown, depth - 1)
