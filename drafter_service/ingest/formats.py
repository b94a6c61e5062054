"""The formats of records: one table, in which each row has a name, the fields by which it is known, and a reader."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from shlex import quote
from typing import Any, NamedTuple

import numpy as np

from drafter_service.ingest import answers, readers, sessions, trajectories
from drafter_service.ingest.answers import Found, conversation, outputs_of
from drafter_service.ingest.bodies import body_of
from drafter_service.ingest.chats import ASSISTANT, Chat, chat_of, is_chat, parsed, role_of, words
from drafter_service.ingest.documents import ORIGIN_FIELDS, Part, RecordError
from drafter_service.ingest.readers import MAX_SHAPES, NOT_SEARCHED, Reader, Value, is_given
from drafter_service.ingest.sessions import Read, Record, Session, Stream

PROMPTS = answers.PROMPTS[: answers.PROMPTS.index("input")]
"""Names of fields that are prompts of a model wherever they are."""
IDS = frozenset((*answers.PROMPT_IDS, *answers.OUTPUT_IDS, *readers.MASKS, "tokens"))
NOT_A_RECORD = "not a JSON object"
NO_OUTPUT = "no output: the answer is empty, missing or of an unknown form, as after a failed request"
OF_A_TEST = "messages beside objects with an output, such as those of a test; name the output with --field"
FAILED_REQUEST = "a request that failed (a status from 400 to 599)"
REPEATED = "a chunk of an answer whose last chunk repeats it"
TOO_DEEP = "a record that is nested too deeply"
STATUSES = ("status", "status_code", "statusCode")
HTTP_ERROR = re.compile(r"[45]\d\d")
SETTINGS = re.compile(
    r"ping|pong|done|init|heartbeat|keep[._-]?alive|session([._-]\w+)?|([\w-]+[._-])?(mode|settings?|config)"
    r"|([\w-]+[._-])?(mode|model|level|settings?|config|limits)[._-]?(changed?|updated?|set)",
    re.IGNORECASE,
)
"""Types of events without a text: of a connection, and of the settings of a session."""

NEAR = 0.5
"""Share of a format's fields that a record has which is said to be near it."""
LIKELY = re.compile(
    r"answer|output|respon|complet|generat(?!or)|gen_?text|final_?text|predict|_pred$|solution|patch|reply|result"
    r"|rationale|llm_?raw|raw_?llm|^code$|\.actions?$|^bot$",
    re.IGNORECASE,
)
"""Names of fields, or the ends of their paths, that are suggested for --field."""
STATUS = re.compile("fail(ed|ure)?|succe(ss|eded)|pass(ed)?|error|ok|done|complete(d)?|true|false|stop", re.IGNORECASE)
"""Texts of fields that say how a run ended."""
HINT = "; if "
"""What a suggestion begins with."""
WORDS = re.compile(r"(?!\d{4}-\d\d-\d\d)[\W\d_]*[^\W\d_]")
"""The beginning of a text that is neither a number nor a time."""
NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,39}")
"""Names of fields that messages repeat. Others may be texts of users."""
NO_FORMAT = "no known format"
ANY_FIELD = "; --field NAME reads one field as the output"
"""Ends a refusal without a suggestion."""
NO_FIELD = "a field of --field is empty, or neither text, messages nor token ids"
MAX_NAMES = 12
"""Names of fields in a reason."""

MAX_DEPTH = 8
MAX_GROUPS = 256
"""Groups that wait for further records at the same time."""
BATCHES = frozenset(words("custom_id method url body params"))
"""Fields of requests of batches, of OpenAI's API and Anthropic's."""
Requests = dict[str, tuple[str, object]]
"""Requests of batches by their `custom_id`: the place of each, and its body."""


class Format(NamedTuple):
    """A row of the table."""

    name: str
    fields: str
    """Fields that all its records have, separated by blanks; alternatives by "|"."""
    read: Reader | None = None
    group: type[Stream] | type[Session] | None = None
    """Joins records whose answers take several. Its `key_of` returns what they have in common; None for others."""


@lru_cache(MAX_SHAPES)
def _rows_of(names: tuple[str, ...]) -> list[Format]:
    """Return the rows of the formats that records with these fields may have."""
    return [row for row in FORMATS if all(not {*field.split("|")}.isdisjoint(names) for field in row.fields.split())]


def read_records(
    records: Iterable[Record], fields: tuple[str, ...] = (), requests: Requests | None = None
) -> Iterator[Read]:
    """Yield the contents of each record, or of several that belong together; a reason for each that has no output.

    Holds only records to which others may belong. fields: paths of fields to read, the output last; empty: the formats
    of the table. requests: gets the requests of batches, and gives them to the responses that follow.
    """
    groups: dict[tuple[str, Hashable], Stream | Session] = {}
    refusals: dict[tuple[str, ...], str] = {}
    for record in records if requests is None or fields else _answered(records, requests):
        if isinstance(record.value, sessions.Unread):
            for stream in groups.values() if record.value.breaks_streams else ():
                stream.is_broken = True
            yield Read(record, "", [], [record.value.reason])
            continue
        yield from _readable(record, read_fields(record, fields) if fields else _read(record, groups, refusals))
        if len(groups) > MAX_GROUPS:
            group = groups.pop(next(iter(groups)))
            yield from _readable(group.first, group.finish())
    for group in groups.values():
        yield from _readable(group.first, group.finish())


def _answered(records: Iterable[Record], requests: Requests) -> Iterator[Record]:
    """Yield records, responses of batches with their requests, which are kept until then."""
    for record in records:
        value = record.value
        name = value.get("custom_id") if isinstance(value, dict) else None
        if not isinstance(name, str):
            yield record
        elif not value.keys() <= BATCHES:
            _, body = requests.pop(name, ("", None))
            yield record if body is None else record._replace(value={"request": body, **value})
        else:  # Of two batches with the same ids it is not known whose response comes first.
            requests[name] = record.place, None if name in requests else value.get("body", value.get("params"))


def _readable(record: Record, reads: Iterable[Read]) -> Iterator[Read]:
    """Yield contents of a record up to the first that cannot be read, and the reason for it."""
    try:
        yield from reads
    except RecordError as problem:
        yield Read(record, "", [], [str(problem)])
    except RecursionError:
        yield Read(record, "", [], [TOO_DEEP])


def _read(
    record: Record, groups: dict[tuple[str, Hashable], Stream | Session], refusals: dict[tuple[str, ...], str]
) -> Iterator[Read]:
    """Read a record by the first row whose format it has. groups, refusals: for the records after it."""
    value = {"": record.value} if isinstance(record.value, list) else record.value
    if not isinstance(value, dict):
        yield Read(record, "", [], [NOT_A_RECORD])
        return
    if reason := _unlearned(value):
        yield Read(record, "", [], [reason])
        return
    names = tuple(value)
    for row in _rows_of(names):
        if row.group is not None and (key := row.group.key_of(value)) is not None:
            name = row.name, key
            group = groups[name] = groups.get(name) or row.group(row.name, record)
            yield from group.add(record)
            if group.is_finished:
                del groups[name]
            return
        skipped: list[str] = []
        found: list[Found] | None = None
        if row.read in (*readers.WEAK, _searched) and is_given(value, row.read):
            found = _of_children(value, skipped)
            skipped += [] if found else [readers.NOT_A_MODEL]
        elif row.read is not None:
            found = row.read(value, skipped)
        if found is not None:
            yield Read(record, row.name, found, skipped if found or skipped else [NO_OUTPUT])
            return
    if not _is_setting(value):
        if names not in refusals:
            refusals[names] = refusal(value) if len(refusals) < MAX_SHAPES else NO_FORMAT
        elif refusals[names] != NO_FORMAT and HINT not in refusals[names]:  # The field may have been empty.
            refusals[names] += _advice(value)
        reason = refusals[names]
        yield Read(record, "", [], [reason if reason == NO_FORMAT or HINT in reason else reason + ANY_FIELD])


def _unlearned(value: Value) -> str | None:
    """Return why a record has no output, although it may have a text; None if it may have an output."""
    places = [place for place in (value, value.get("response")) if isinstance(place, dict)]
    if any(HTTP_ERROR.fullmatch(str(place[name])) for place in places for name in STATUSES if name in place):
        return FAILED_REQUEST
    meta = value.get("meta_info")  # SGLang
    return REPEATED if isinstance(meta, dict) and meta.get("finish_reason", "") is None else None


def _is_setting(event: Value) -> bool:
    """Return whether an event has only settings of a session, or tells that a connection is alive."""
    kind = event.get("type", event.get("event"))
    if isinstance(kind, str) and SETTINGS.fullmatch(kind):
        return not any(LIKELY.search(name) for name in event)
    texts = [value for value in event.values() if not isinstance(value, int | float | None)]
    is_of_session = sessions.CLAUDE_FIELDS & event.keys() and not event.keys() & {"type", "message", *sessions.OTHERS}
    return bool(is_of_session) and all(isinstance(text, str) and " " not in text for text in texts)


def _searched(record: Value, skipped: list[str], depth: int = 0) -> list[Found] | None:
    """Read conversations and records in lists and objects of a record, the outermost ones."""
    found: list[Found] = []
    for name, value in record.items():
        if not isinstance(value, list | dict) or readers.NOT_SEARCHED.search(name) or depth > MAX_DEPTH:
            continue
        if is_chat(value):
            others = (inner for one in record.values() if isinstance(one, dict) for inner in one.values())
            if any(isinstance(other, dict) and isinstance(other.get("output"), str) for other in others):
                skipped.append(OF_A_TEST)
            else:
                found += conversation(value, record, skipped) or []
            continue
        values = value if isinstance(value, list) else [value]
        for one, following in zip(values, [*values[1:], None], strict=False):
            is_list = isinstance(one, list) and one and isinstance(one[0], dict | list)
            if (is_list or isinstance(one, dict)) and not _goes_on(one, following):
                found += _found_in({"": one} if is_list else one, skipped, depth)
    return found or None


def _goes_on(chat: Any, following: Any) -> bool:
    """Return whether a list of messages is repeated in the next one, perhaps without some of the user."""
    if not is_chat(chat) or not is_chat(following) or len(chat) >= len(following) or chat[0] != following[0]:
        return False
    first, second = ([one for one in messages if role_of(one) == ASSISTANT] for messages in (chat, following))
    return second[: len(first)] == first


def _found_in(value: Value, skipped: list[str], depth: int) -> list[Found]:
    """Read an object inside of a record; rows of a table only with a prompt and an output.

    Other objects, such as descriptions of models, have an `input` and an `output`, too.
    """
    if is_given(value):
        return _of_children(value, skipped, depth + 1)
    if "choices" in value and answers.deltas_of(value) is not None:  # A chunk, which is only a piece
        return []
    for row in _rows_of(tuple(value)):
        if row.read in (None, readers.text, readers.ALL_IDS) or not row.fields or is_given(value, row.read):
            continue
        if row.name == "input and output" and value.keys().isdisjoint(PROMPTS):
            continue
        notes: list[str] = []
        found = row.read(value, notes)
        is_span = row.read is readers.span and found is not None  # Its parts repeat those of other spans.
        if is_span or (found and (row.read not in readers.WEAK or found[0].prompt is not None)):
            skipped += notes
            return found or []
    return _searched(value, skipped, depth + 1) or []


def _of_children(step: Value, skipped: list[str], depth: int = 0) -> list[Found]:
    """Read the calls of a model in a step that is not one, as in promptflow and LangSmith."""
    return _searched({name: step[name] for name in ("children", "child_runs") if name in step}, skipped, depth) or []


# --- Fields that the user names


def read_fields(record: Record, fields: tuple[str, ...]) -> Iterator[Read]:
    """Yield the outputs in the last of the fields that the user names, with the prompt in the others."""
    skipped: list[str] = []
    found: list[Found] = []
    *before, outputs = reached = [[*_reached(record.value, field.replace("[]", ""))] for field in fields]
    prompt = _joined([value for values in before for value in values])
    for value in outputs if all(before) else ():
        body = body_of(value)
        if is_chat(body):
            found += conversation(body, record.value, skipped, prompt) or []
        elif body is not value or not isinstance(value, dict) or role_of(value) is not None or "choices" in value:
            found += [Found(output, prompt) for output in outputs_of(body, skipped)]
    reason = next((f"no field {field}" for field, values in zip(fields, reached, strict=True) if not values), NO_FIELD)
    yield Read(record, "--field", found, skipped) if found else Read(record, "", [], [reason + _names(record.value)])


def _reached(value: object, path: str) -> Iterator[object]:
    """Yield what is at a path such as "choices.0.text", or "choices.text" for the texts of all elements."""
    value = parsed(value) if path else value
    name, _, rest = path.partition(".")
    if not path:
        yield value
    elif isinstance(value, dict) and (path in value or name in value):
        yield from _reached(value[path], "") if path in value else _reached(value[name], rest)
    elif isinstance(value, dict) and ("*" in name or "?" in name):
        for key in value:
            if fnmatchcase(key, name):
                yield from _reached(value[key], rest)
    elif isinstance(value, list):
        for element in value[int(name) : int(name) + 1] if name.isdecimal() else value:
            yield from _reached(element, rest if name.isdecimal() or name == "*" else path)


def _joined(values: list[object]) -> Part | Chat | None:
    """Return the parts of a prompt as one. Raises RecordError for parts that are of different kinds."""
    if len(values) == 1 and (chat := chat_of(body_of(values[0]))) is not None:
        return chat
    parts = [answers.part_of(value) for value in values]
    texts = [part for part in parts if isinstance(part, str)]
    tokens = [part for part in parts if isinstance(part, np.ndarray)]
    if max(len(texts), len(tokens)) < len(parts):
        raise RecordError(NO_FIELD)
    return "\n".join(texts) if texts else np.concatenate(tokens) if tokens else None


# --- Refusals


def refusal(record: Value) -> str:
    """Return why a record is not read, with the names of its fields but without any of its values."""
    return NO_FORMAT + _names(record) + _nearest(record) + _advice(record)


def _nearest(record: Value) -> str:
    """Return the format of which a record has the largest share of the fields; "" if that is less than `NEAR`."""
    shares = {
        row: sum(not record.keys().isdisjoint(field.split("|")) for field in row.fields.split()) / count
        for row in FORMATS
        if row.read is not None and (count := len(row.fields.split())) > 1
    }
    nearest = max(shares, key=lambda row: shares[row])
    needs = ", ".join(" or ".join(field.split("|")[:3]) for field in nearest.fields.split())
    return f"; the nearest format is {nearest.name} ({needs})" if shares[nearest] >= NEAR else ""


def _advice(record: Value) -> str:
    """Return the --field that may read a record; "" if no field has a text and the name of an output."""
    firsts = [value[0] if isinstance(value, list) and value else value for value in record.values()]
    is_long = len(record) > MAX_NAMES and FIELDS.isdisjoint(record)
    if len(kinds := {*map(type, firsts)}) == 1 and (is_long or not any(map(NAME.fullmatch, record))):  # Keyed by ids
        if kinds == {dict} and (inner := _advice(firsts[0]).rpartition("--field ")[2].strip("'")):
            return f"{HINT}*.{inner} is an output, give --field {quote(f'*.{inner}')}"
        return f"{HINT}all values are outputs, give --field '*'" if kinds == {str} else ""
    # Events and turns have texts of users and tools, too.
    is_turn = record.get("source", record.get("speaker")) in ("agent", "human", "system", "user")
    if {"type", "timestamp"} <= record.keys() or is_turn:
        return ""
    texts = dict(_texts_in(record, ""))
    likely = [
        path for path, text in texts.items() if LIKELY.search(path) and WORDS.match(text) and not STATUS.fullmatch(text)
    ]
    if not likely:
        return ""
    path = _widened(max(likely, key=lambda path: (" " in texts[path], len(texts[path]))), likely, record)
    prompt = next((f"--field {name} " for name in answers.PROMPTS if isinstance(record.get(name), str)), "")
    return f"{HINT}{path} is an output, give {prompt}--field {quote(path)}"


def _widened(path: str, likely: list[str], record: Value) -> str:
    """Return the pattern of most likely paths, alike but for a part, number or last letter, which no others have."""
    parts = path.split(".")
    patterns = [".".join([*parts[:at], "*", *parts[at + 1 :]]) for at in range(len(parts))]
    best, count = path, 1
    for pattern in (re.sub(r"\d+", "*", path), re.sub("(?<=_)[A-Za-z]$", "?", path), *patterns):
        alike = [one for one in likely if fnmatchcase(one, pattern)]
        reached = sum(len([*_reached(record, one)]) for one in alike)
        if len(alike) > count and reached == len([*_reached(record, pattern)]):
            best, count = pattern, len(alike)
    return best


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


FORMATS = (
    Format("OpenAI, streamed chunks", "choices id|object|created|model", group=Stream),
    Format("streamed events of other APIs", "|".join(("type", *answers.BEDROCK)), group=Stream),
    Format("Ollama", "done message|response", group=Stream),
    Format("llama.cpp", "content stop", group=Stream),
    Format("OpenHands, events", "action|observation source", group=sessions.Actions),
    Format(
        "messages, one per record",
        "role|from|type|author|isCreatedByUser|record_type|info content|value|parts|text|message|data|tool_calls"
        "|payload|summary|call_id|record_type|sessionId|session_id|leafUuid|messageId|raw|tool_id|processed_at",
        group=Session,
    ),
    Format("OpenAI chat and completions", "choices", readers.response),
    Format("OpenAI Responses API", "output", readers.response),
    Format("Anthropic messages", "role content type", readers.response),
    Format("Cohere", "finish_reason message", readers.response),
    Format("Gemini", "candidates", readers.response, group=sessions.GeminiStream),
    Format(
        "OpenTelemetry and OpenInference, span", "attributes|gen_ai.output.messages|gen_ai.completion", readers.span
    ),
    Format("ChatGPT, export", "mapping", trajectories.tree),
    Format("VS Code, Copilot Chat", "requests responderUsername", trajectories.copilot),
    Format("Google AI Studio", "chunkedPrompt", trajectories.ai_studio),
    Format("prompt and samples", "samples model|prompt", readers.columns(("samples",))),
    Format("Inspect, sample", "messages output epoch", readers.messages),
    Format("BFCL", "result id|idx input_token_count|latency|inference_log", readers.bfcl),
    Format("request and response", "|".join(readers.RESPONSES), readers.request_and_response),
    Format("OpenAI batch, input", "custom_id body", readers.unanswered),
    Format("HTTP, recorded response", "headers body status", readers.response),
    Format("token ids with a mask", "input_ids " + "|".join(readers.MASKS), readers.masked_ids),
    Format("token ids", "|".join(answers.OUTPUT_IDS), readers.ids(answers.OUTPUT_IDS, answers.PROMPT_IDS)),
    Format("lm-eval", "resps|filtered_resps", readers.lm_eval),
    Format("TRL and DPO, preferences", "chosen|chosen_messages", readers.chosen),
    Format("OpenHands, history", "history", trajectories.events),
    Format("SWE-agent, steps", "trajectory", trajectories.steps),
    Format("Harbor, trajectory", "schema_version steps", trajectories.atif),
    Format("prompt and completion", "|".join(readers.COMPLETIONS), readers.COLUMNS[0]),
    Format(
        "HumanEval, EvalPlus, LiveCodeBench",
        "solution|code_list task_id|question_id|is_solved",
        readers.columns(("implementations", "code_list", "raw_solution", "solution")),
    ),
    Format("conversation", "|".join(readers.CONVERSATIONS), readers.messages),
    Format("input and output", "|".join(readers.OUTPUTS), readers.COLUMNS[1]),
    Format(
        "question and answer of a model",
        "answer model|model_id|generator|usage|contexts|retrieved_contexts",
        readers.COLUMNS[2],
    ),
    Format("text", "text", readers.text),
    Format("all token ids", "tokens|input_ids", readers.ALL_IDS),
    Format("records inside of others", "", _searched),
)
"""All formats. The first one that a record has is read."""

FIELDS = frozenset(
    (
        *re.findall(r"[^ |]+", " ".join(row.fields for row in FORMATS)),
        *(*readers.REQUESTS, *answers.CHATS, *answers.PROMPT_IDS, *answers.PROMPTS, *ORIGIN_FIELDS),
        *(*readers.THOUGHTS, *(f"model_{name}" for name in readers.THOUGHTS), "tools", "chat_template_kwargs"),
    )
)
"""Names of all fields that are read in a row of a table."""
