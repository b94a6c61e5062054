"""The formats of records: one table, in which each row has a name, the fields by which it is known, and a reader."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import islice
from shlex import quote
from typing import Any, NamedTuple

import numpy as np

from drafter_service.ingest import answers, exports, origins, sessions
from drafter_service.ingest.answers import Found, body_of, conversation, exchange, outputs_of, prompt_of
from drafter_service.ingest.chats import ASSISTANT, USER, Chat, chat_of, is_chat, parsed, role_of, words
from drafter_service.ingest.documents import Part, RecordError
from drafter_service.ingest.exports import NOT_A_MODEL, STEPS, Reader, Value
from drafter_service.ingest.sessions import (
    NO_ANSWER,
    Dialect,
    Read,
    Record,
    Session,
    Stream,
    is_markdown_chat,
    markdown_chat,
)

__all__ = ["FIELDS", "FORMATS", "Found", "Read", "Record", "is_markdown_chat", "markdown_chat", "read_records"]

REQUESTS = words("request request_body requestBody body reqPayload proxy_server_request kwargs inputs input")
RESPONSES = words("response response_body responseBody respPayload response_obj result outputs output")
COMPLETIONS = words(
    "completion completions response responses generation generations generated_text generated_texts model_output"
    " model_outputs model_response full_model_response raw_output raw_outputs output_text output_list llm_output"
    " generated_answer prediction predictions pred"
)
"""Names of fields with what a model wrote, the most exact ones first."""
PROMPTS = answers.PROMPTS[: answers.PROMPTS.index("input")]
"""Names of fields that are prompts of a model wherever they are."""
OUTPUTS = ("output", "outputs")
"""Names of fields that may also have a reference. They are read only if there is none of the others."""
EXTRACTED = frozenset(words("generated_answer prediction predictions pred"))
"""Those that may have only the answer that was extracted from a longer text or conversation."""
LONGER = re.compile(
    r"code|solution|generat|output|respon|complet|reason|thought|cot$|rationale|traj|^raw_", re.IGNORECASE
)
"""Names of fields with such texts."""
THOUGHTS = ("reasoning", "reasoning_content", "thinking")
CONVERSATIONS = (
    *answers.CHATS,
    *words("traj history trajectory dialogue dialog chat chat_history message_log events aider"),
)
MASKS = words("labels loss_mask assistant_masks completion_mask")
IDS = frozenset((*answers.PROMPT_IDS, *answers.OUTPUT_IDS, *MASKS, "tokens"))
TASK = frozenset(words("canonical_solution test test_list tests test_cases options choices code starter_code targets"))
"""Fields of tasks, whose text is a prompt, and whose answer or solution is the right one."""
FAILED = frozenset(words("error error_message exception status status_code"))
"""Fields that say why there is no response."""
GIVEN = re.compile(
    r"(^|[._-])(tool|function|user|human|observation)([._-]|$)|(^|[._-])(prompt|input|request)$"
    r"|(tool|function)(call)?(result|response|output)"
)
"""Types of records, and of objects in them, whose text no model wrote: results of tools, texts of users, requests.
In lowercase."""
OF_TOOLS = frozenset(words("toolCallId tool_call_id toolUseId tool_use_id"))
"""Fields of results of tools."""

READABLE = (str, list, dict, np.ndarray, type(None))

NOT_SEARCHED = re.compile(
    "prompt|reject|refer|gold|ground|target|expected|judg|demo|example|shot|task|config|tool|^function|args|input"
    "|requests?$|^user|^human(?!.?eval)|question|query|template|metadata|instance|annotat|observ|^id$|_id$|^gt_|model_name",
    re.IGNORECASE,
)
"""Names of fields in which no outputs are searched."""
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

NOT_A_RECORD = "not a JSON object"
NO_OUTPUT = "no output: the answer is empty, or the request failed"
NO_RESPONSE = "a request of a batch without its response"
REJECTED = "an answer that is labelled as bad"
SHORTER = "an answer that is extracted from a longer text beside it; name the text with --field"
SCORES = "scores of given answers, which are not outputs"
TOO_DEEP = "a record that is nested too deeply"
NO_FORMAT = "no known format"
NO_FIELD = "a field of --field is missing, or neither text, messages nor token ids"

SETTINGS = re.compile(
    r"ping|pong|done|heartbeat|keep[._-]?alive|session([._-]\w+)?|([\w-]+[._-])?(mode|settings?|config)"
    r"|([\w-]+[._-])?(mode|model|level|settings?|config|limits)[._-]?(changed?|updated?|set)",
    re.IGNORECASE,
)
"""Types of events without a text: of a connection, and of the settings of a session."""

LONG = 40
"""Length of texts of several words that may be outputs, whatever the name of their field."""
MAX_DEPTH = 8
MAX_NAMES = 12
"""Names of fields in a reason; elements of a list or an object in which a field to suggest is searched."""
MAX_SHAPES = 32
"""Different sets of fields in one file for which reasons have the names; a file may have objects keyed by ids."""
MAX_GROUPS = 256
"""Groups that wait for further records at the same time."""


class Format(NamedTuple):
    """A row of the table."""

    name: str
    fields: str
    """Fields that all its records have, separated by blanks; alternatives by "|"."""
    read: Reader | None = None
    group: type[Stream] | Dialect | None = None
    """The reader of formats whose answers take several records."""

    def share(self, names: Iterable[str]) -> float:
        """Return the share of its fields that are among the names: 1 if a record with these may have the format."""
        fields = self.fields.split()
        return sum(any(name in names for name in field.split("|")) for field in fields) / max(len(fields), 1)


@lru_cache(MAX_SHAPES)
def _rows_of(names: tuple[str, ...]) -> list[Format]:
    """Return the rows of the formats that records with these fields may have."""
    return [row for row in FORMATS if row.share(names) == 1 or not row.fields]


def read_records(records: Iterable[Record], fields: tuple[str, ...] = ()) -> Iterator[Read]:
    """Yield the contents of each record, or of several that belong together; a reason for each that has no output.

    Holds only records to which others may belong. fields: paths of fields to read, the output last; empty: the formats
    of the table.
    """
    groups: dict[tuple[str, Hashable], Stream | Session] = {}
    refusals: dict[tuple[str, ...], str] = {}
    for record in records:
        if isinstance(record.value, sessions.Unread):
            for stream in groups.values() if record.value.breaks_streams else ():
                stream.is_broken = True
            yield Read(record, "", [], [record.value.reason])
            continue
        try:
            yield from _read_fields(record, fields) if fields else _read(record, groups, refusals)
        except (RecordError, RecursionError) as problem:
            yield _unreadable(record, problem)
        if len(groups) > MAX_GROUPS:
            yield from _ended(groups.pop(next(iter(groups))))
    for group in groups.values():
        yield from _ended(group)


def _ended(group: Stream | Session) -> Iterator[Read]:
    try:
        yield from group.finish()
    except (RecordError, RecursionError) as problem:
        yield _unreadable(group.first, problem)


def _unreadable(record: Record, problem: RecordError | RecursionError) -> Read:
    return Read(record, "", [], [str(problem) if isinstance(problem, RecordError) else TOO_DEEP])


def _read(
    record: Record, groups: dict[tuple[str, Hashable], Stream | Session], refusals: dict[tuple[str, ...], str]
) -> list[Read]:
    """Read a record by the first row whose format it has. groups, refusals: for the records after it."""
    value = {"": record.value} if isinstance(record.value, list) else record.value
    if not isinstance(value, dict):
        return [Read(record, "", [], [NOT_A_RECORD])]
    if np.ndarray in map(type, value.values()):  # Only of these columns arrays are read.
        value = {
            name: one.tolist() if isinstance(one, np.ndarray) and name not in IDS else one
            for name, one in value.items()
        }
        record = record._replace(value=value)
    names = tuple(value)
    for row in _rows_of(names):
        if row.group is not None and (key := row.group.key_of(value)) is not None:
            name = row.name, key
            group = groups[name] = groups.get(name) or row.group(row.name, record)
            reads = list(group.add(record))
            if group.is_finished:
                del groups[name]
            return reads
        if row.read in WEAK and _is_given(value, row.read):
            return [Read(record, row.name, [], [NOT_A_MODEL])]
        skipped: list[str] = []
        if row.read is not None and (found := row.read(value, skipped)) is not None:
            return [Read(record, row.name, found, skipped if found or skipped else [NO_OUTPUT])]
    if _is_setting(value):
        return []
    if names not in refusals:
        refusals[names] = _refusal(value) if len(refusals) < MAX_SHAPES else NO_FORMAT
    return [Read(record, "", [], [refusals[names]])]


def _is_setting(event: Value) -> bool:
    """Return whether an event has only settings of a session, or tells that a connection is alive."""
    kind = event.get("type", event.get("event"))
    if isinstance(kind, str) and SETTINGS.fullmatch(kind):
        return not any(LIKELY.search(name) for name in event)
    texts = [value for value in event.values() if not isinstance(value, int | float | None)]
    is_of_session = sessions.CLAUDE_FIELDS & event.keys() and not event.keys() & {"type", "message", *sessions.OTHERS}
    return bool(is_of_session) and all(isinstance(text, str) and " " not in text for text in texts)


def is_conversation(found: list[Found]) -> bool:
    """Return whether the outputs of a record are turns of one conversation, and not answers to the same prompt."""
    return len({len(one.prompt.messages) if isinstance(one.prompt, Chat) else 0 for one in found}) > 1


def _is_given(value: Value, read: Reader | None = None) -> bool:
    """Return whether a record, or an object in one, says that its text, or what `read` reads, is not a model's."""
    kind = str(value.get("run_type", value.get("type"))).lower()
    is_step = kind in STEPS and read in (_exchange, COLUMNS[1])
    is_given = GIVEN.search(kind) is not None and not ("request" in kind and "response" in value)
    return is_step or is_given or any(value.get(name) for name in OF_TOOLS)


# --- Readers


def _none(skipped: list[str], reason: str) -> list[Found]:
    skipped.append(reason)
    return []


def _response(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read a record that is a response, with its request or without."""
    name = next((name for name in ("choices", "candidates", "output") if record.get(name) is not None), "")
    parts = record.get(name, [record])
    is_response = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
    if name == "output":
        is_response = is_response and parts != [] and all("type" in part for part in parts)
    elif not name:
        is_response = record.get("type") == "message" and role_of(record) == ASSISTANT
    return exchange(record, record, skipped, record.get("request_id")) if is_response or name == "candidates" else None


def _exchange(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read a request and its response, or a step of a trace; not columns of texts."""
    request = next((body_of(record[name]) for name in REQUESTS if record.get(name)), None)
    response = next((body_of(record[name]) for name in RESPONSES if name in record), None)
    first = request[0] if isinstance(request, list) and request else request
    if not isinstance(response, dict) and not isinstance(first, dict | list):
        return None
    if isinstance(response, dict) and isinstance(response.get("message"), dict) and "type" in response:
        response = response["message"]  # Anthropic's batches
    return exchange(record if request is None else request, response, skipped, record.get("request_id"))


def _token_columns(record: Value, _: list[str]) -> list[Found] | None:
    output = answers.first_ids(record, answers.OUTPUT_IDS)
    return None if output is None else [Found(output, answers.first_ids(record, answers.PROMPT_IDS))]


def _masked_ids(record: Value, _: list[str]) -> list[Found] | None:
    """Read token ids with a mask: the label -100, or the mask 0, is of the prompt."""
    ids, name = answers.ids_of(record["input_ids"]), next(name for name in MASKS if name in record)
    try:
        mask = np.asarray(record[name], np.int64)
    except (ValueError, TypeError, OverflowError):
        return None
    if ids is None or mask.shape != ids.shape:
        return None
    is_output = mask != -100 if name == "labels" else mask != 0
    edges = np.flatnonzero(np.diff(is_output, prepend=False, append=False)).reshape(-1, 2)
    return [Found(ids[begin:end], ids[:begin] if begin else None) for begin, end in edges]


def _lm_eval(record: Value, skipped: list[str]) -> list[Found] | None:
    prompt: object = record.get("arguments")
    while isinstance(prompt, list | dict) and prompt and not is_chat(prompt):
        prompt = body_of(next(iter(prompt.values())) if isinstance(prompt, dict) else prompt[0])
    samples = record.get("resps") or record.get("filtered_resps") or []
    samples = samples if isinstance(samples, list) else []
    texts = [text for one in samples for text in (one if isinstance(one, list) else [one])]
    if not all(isinstance(text, str) for text in texts):
        return _none(skipped, SCORES)
    return exchange(prompt, texts, skipped)


def _chosen(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read the better one of two answers."""
    chosen = record.get("chosen") or record.get("chosen_messages")
    prompt = prompt_of(record)
    if isinstance(chosen, str) and prompt is None:  # Conversations of HH-RLHF
        before, mark, answer = chosen.rpartition("\n\nAssistant:")
        return exchange(before + mark, answer.strip(), skipped)
    if isinstance(chosen, list) and len(chosen) > 1 and is_chat(chosen):
        return (conversation(chosen, record, skipped) or [])[-1:]
    return [Found(output, prompt) for output in outputs_of(chosen, skipped)]


def _columns(names: Iterable[str]) -> Reader:
    """Return a reader of rows with an output in the first of these fields that has one."""

    def read(record: Value, skipped: list[str]) -> list[Found] | None:
        present = [name for name in names if name in record and isinstance(record[name], READABLE)]
        name = next((name for name in present if record[name] is not None and len(record[name])), None)
        if not present or (names is not COMPLETIONS and TASK & record.keys()):
            return None
        if name is None:
            is_null = not FAILED & record.keys() and all(record[name] is None for name in present)  # In a table
            return None if is_null else []
        if name in EXTRACTED and _is_extracted(record, name):
            return _none(skipped, SHORTER)
        if _is_rejected(record, skipped):
            return []
        prompt, value = prompt_of(record, name), body_of(record[name])
        if name in EXTRACTED and isinstance(prompt, Chat) and prompt.messages[-1]["role"] == ASSISTANT:
            return None
        if is_chat(value):
            return conversation(value, record, skipped, prompt)
        while isinstance(prompt, Chat) and prompt.messages[-1:] and prompt.messages[-1]["role"] == ASSISTANT:
            prompt = prompt._replace(messages=prompt.messages[:-1])  # The same answer, or another one
        outputs = outputs_of(value, skipped)
        thoughts: Any = next((record[key] for key in THOUGHTS if isinstance(record.get(key), str | list)), [])
        thoughts = thoughts if isinstance(thoughts, list) else [thoughts]
        texts = value if isinstance(value, list) and len(value) == len(thoughts) else outputs
        if len(texts) == len(thoughts) and all(isinstance(part, str | None) for part in (*texts, *thoughts)):
            pairs = [(text, thought) for text, thought in zip(texts, thoughts, strict=True) if text]
            messages = [{"role": ASSISTANT, "content": text, "reasoning": thought} for text, thought in pairs]
            outputs = [output for message in messages for output in outputs_of(message, skipped)]
        several = next((record[key] for key in ("prompts", "inputs", "input_texts") if key in record), None)
        if isinstance(several, list) and len(several) == len(outputs):
            return [Found(output, prompt_of(one)) for output, one in zip(outputs, several, strict=True)]
        return [Found(output, prompt) for output in outputs]

    return read


def _is_extracted(record: Value, name: str) -> bool:
    """Return whether another field has the longer text that the answer in a field was extracted from."""
    others = [other for other in record if LONGER.search(other) and not NOT_SEARCHED.search(other)]
    return any(2 * len(str(record[name])) < len(_first_text(record[other])) for other in others if other != name)


def _first_text(value: object) -> str:
    while isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else ""


def _is_rejected(record: Value, skipped: list[str]) -> bool:
    """Return whether a row, as of KTO, has an answer that is not wanted, and note it."""
    is_rejected = record.get("label") is False or record.get("kto_tag") is False
    skipped += [REJECTED] if is_rejected else []
    return is_rejected


def _conversation(record: Value, skipped: list[str]) -> list[Found] | None:
    for name in CONVERSATIONS:
        messages: Any = parsed(record.get(name))
        if "uid" in record and is_chat(messages):  # Arena-Hard has answers as objects.
            contents = [one.get("content") for one in messages]
            texts = [content.get("answer", content) if isinstance(content, dict) else content for content in contents]
            messages = [{**one, "content": text} for one, text in zip(messages, texts, strict=True)]
        notes: list[str] = []
        if (found := conversation(messages, record, notes)) is not None:
            if _is_rejected(record, skipped):
                return []
            skipped += notes if found or notes else [NO_ANSWER]
            return found
    return None


def _solutions(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read code that a model wrote, and its reflections. Tasks have the right solution in a field of that name."""
    if TASK & record.keys() and "is_solved" not in record:
        return None
    names = ("implementations", "code_list", "raw_solution", "solution")
    solution = next((record[name] for name in names if record.get(name)), None)
    written = [*outputs_of(solution, skipped), *outputs_of(record.get("reflections"), skipped)]
    return [Found(output, prompt_of(record)) for output in written]


def _steps(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read a trajectory of SWE-agent that has no messages."""
    steps = record["trajectory"] if isinstance(record["trajectory"], list) and "history" not in record else []
    messages = [
        {"role": role, "content": step[name]}
        for step in steps
        for role, name in ((ASSISTANT, "response"), (USER, "observation"))
        if isinstance(step, dict) and isinstance(step.get(name), str)
    ]
    return conversation(messages, record, skipped) or None


def _events(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read the events of OpenHands, or, in older versions, pairs of an action and an observation."""
    history = record["history"] if isinstance(record["history"], list) else []
    events = [event for one in history for event in (one if isinstance(one, list) else [one])]
    events = [event for event in events if isinstance(event, dict)]
    if not any("action" in event or "observation" in event for event in events) or chat_of(events) is not None:
        return None
    session = sessions.OPENHANDS("", Record(record, ""))
    reads = [read for event in events for read in session.add(Record(event, ""))] + list(session.finish())
    skipped += [reason for read in reads for reason in read.skipped]
    return [found for read in reads for found in read.outputs]


def _text(record: Value, _: list[str]) -> list[Found] | None:
    text = record["text"]
    is_text = isinstance(text, str) and text and not TASK & record.keys()
    return [Found(text)] if is_text and "role" not in record and not is_chat([record]) else None


def _all_ids(record: Value, _: list[str]) -> list[Found] | None:
    ids = answers.first_ids(record, ("tokens", "input_ids"))
    return None if ids is None else [Found(ids)]


def _searched(record: Value, skipped: list[str], depth: int = 0) -> list[Found] | None:
    """Read conversations and records in lists and objects of a record, the outermost ones."""
    found: list[Found] = []
    for name, value in record.items():
        if not isinstance(value, list | dict) or NOT_SEARCHED.search(name) or depth > MAX_DEPTH:
            continue
        if is_chat(value):
            found += conversation(value, record, skipped) or []
            continue
        values = value if isinstance(value, list) else [value]
        for one, following in zip(values, [*values[1:], None], strict=False):
            if _goes_on(one, following):
                continue
            is_list = isinstance(one, list) and one and isinstance(one[0], dict | list)
            if is_list or isinstance(one, dict):
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
    if _is_given(value):
        return []
    for row in FORMATS:
        if row.read is None or row.read in (_text, _all_ids, _searched) or row.share(value) < 1:
            continue
        if row.name == "input and output" and value.keys().isdisjoint(PROMPTS):
            continue
        notes: list[str] = []
        found = None if _is_given(value, row.read) else row.read(value, notes)
        if row.read is exports.span and found is not None:  # Its parts repeat those of other spans.
            skipped += notes
            return found
        if found and (row.read not in WEAK or found[0].prompt is not None):
            skipped += notes
            return found
    return _searched(value, skipped, depth + 1) or []


COLUMNS = (_columns(COMPLETIONS), _columns(OUTPUTS), _columns(("answer",)))
WEAK = (_exchange, *COLUMNS, _text, _searched)
"""Readers of fields that steps without a model have, too."""

FORMATS = (
    Format("OpenAI, streamed chunks", "choices id|object|created|model", group=Stream),
    Format("Anthropic and Responses API, streamed events", "type", group=Stream),
    Format("Ollama", "done message|response", group=Stream),
    Format("Assistants API, events of threads", "object|event", group=sessions.THREADS),
    Format("OpenHands, events", "action|observation source", group=sessions.OPENHANDS),
    Format(
        "messages, one per record",
        "role|from|type|author|isCreatedByUser|record_type content|value|parts|text|message|data|tool_calls"
        "|payload|summary|call_id|record_type|sessionId|session_id|leafUuid|messageId",
        group=sessions.MESSAGES,
    ),
    Format("MT-Bench", "choices question_id", _response),
    Format("OpenAI chat and completions", "choices", _response),
    Format("OpenAI Responses API", "output", _response),
    Format("Anthropic messages", "role content type", _response),
    Format("Gemini", "candidates", _response, group=Stream),
    Format("OpenTelemetry and OpenInference, span", "attributes|gen_ai.output.messages", exports.span),
    Format("ChatGPT, export", "mapping", exports.tree),
    Format("BFCL", "result id", exports.function_calls),
    Format("prompt and samples", "samples model|prompt", exports.samples),
    Format("Inspect, sample", "messages output epoch", _conversation),
    Format("Inspect, log", "samples eval", _searched),
    Format("LangSmith", "inputs outputs run_type", _exchange),
    Format("Langfuse", "input output type|traceId|trace_id", _exchange),
    Format("request and response", "|".join(RESPONSES), _exchange),
    Format("OpenAI batch, input", "custom_id body", lambda _, skipped: _none(skipped, NO_RESPONSE)),
    Format("token ids with a mask", "input_ids " + "|".join(MASKS), _masked_ids),
    Format("token ids", "|".join(answers.OUTPUT_IDS), _token_columns),
    Format("lm-eval", "resps|filtered_resps", _lm_eval),
    Format("TRL and DPO, preferences", "chosen|chosen_messages", _chosen),
    Format("OpenHands, history", "history", _events),
    Format("SWE-agent, steps", "trajectory", _steps),
    Format("vLLM and SGLang, benchmark", "generated_texts", COLUMNS[0]),
    Format("prompt and completion", "|".join(COMPLETIONS), COLUMNS[0]),
    Format("HumanEval, EvalPlus, LiveCodeBench", "solution|code_list task_id|question_id|is_solved", _solutions),
    Format("aider, chat history", "aider", _conversation),
    Format("conversation", "|".join(CONVERSATIONS), _conversation),
    Format("Alpaca and AlpacaEval", "instruction output", COLUMNS[1]),
    Format("input and output", "|".join(OUTPUTS), COLUMNS[1]),
    Format(
        "question and answer of a model",
        "answer model|model_id|generator|usage|contexts|retrieved_contexts",
        COLUMNS[2],
    ),
    Format("answers of named models", "", exports.named_answers),
    Format("text", "text", _text),
    Format("all token ids", "tokens|input_ids", _all_ids),
    Format("records inside of others", "", _searched),
)
"""All formats. The first one that a record has is read."""

FIELDS = frozenset(
    (*(name for row in FORMATS for field in row.fields.split() for name in field.split("|")), *REQUESTS, *answers.CHATS)
) | frozenset((*answers.PROMPT_IDS, *answers.PROMPTS, *THOUGHTS, "tools", "chat_template_kwargs", *origins.FIELDS))
"""Names of all fields that are read in a row of a table."""


# --- Fields that the user names


def _read_fields(record: Record, fields: tuple[str, ...]) -> list[Read]:
    skipped: list[str] = []
    found: list[Found] = []
    *before, outputs = ([*_reached(record.value, field.replace("[]", ""))] for field in fields)
    prompt = _joined([value for values in before for value in values])
    for value in outputs if all(before) else ():
        if is_chat(value):
            found += conversation(value, record.value, skipped, prompt) or []
        elif not isinstance(value, dict) or role_of(value) is not None:
            found += [Found(output, prompt) for output in outputs_of(value, skipped)]
    return [
        Read(record, "--field", found, skipped) if found else Read(record, "", [], [NO_FIELD + _names(record.value)])
    ]


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


def _refusal(record: Value) -> str:
    """Return why a record is not read, with the names of its fields but without any of its values."""
    near = record.keys() | {name for field in record for name in get_close_matches(field, FIELDS, 1, 0.75)}
    rows = [row for row in FORMATS if row.fields and row.read]
    nearest = max(
        reversed(rows), key=lambda row: row.share(near) * row._replace(fields=row.fields.split()[0]).share(near)
    )
    needs = ", ".join(" or ".join(field.split("|")[:3]) for field in nearest.fields.split())
    shown = f"; the nearest format is {nearest.name} ({needs})" if nearest.share(near) else ""
    return NO_FORMAT + _names(record) + shown + _advice(record)


def _advice(record: Value) -> str:
    """Return the --field that may read a record; "" if no field is likely to have an output, or several may."""
    lengths: dict[str, int] = {}
    for path, text in _texts_in(record, ""):
        if WORDS.match(text):
            lengths[path] = max(len(text) if " " in text else 0, lengths.get(path, 0))
    likely = [path for path in lengths if LIKELY.search(path)]
    others = [path for path, length in lengths.items() if length > LONG]
    if len(others) == 1 and not any(lengths[path] for path in likely):  # The likely ones are words, such as "passed".
        likely = others
    if not likely or {"type", "timestamp"} <= record.keys():  # Events have texts of users and tools, too.
        return ""
    path = max(likely, key=lengths.__getitem__)
    prompt = next((f"--field {name} " for name in answers.PROMPTS if isinstance(record.get(name), str)), "")
    return f"; if {path} is an output, give {prompt}--field {quote(path)}"


def _names(record: object) -> str:
    names = sorted(name for name in record if isinstance(name, str)) if isinstance(record, dict) else []
    shown = [name for name in names if NAME.fullmatch(name)][:MAX_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f" in a record with the fields {', '.join(shown)}{more}" if shown else ""


def _texts_in(value: object, path: str, depth: int = 4) -> Iterator[tuple[str, str]]:
    """Yield the texts in a value that may be outputs, each after its path, in which "*" stands for keys and numbers."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for element in value[:MAX_NAMES]:
            yield from _texts_in(element, path.removesuffix("[]") + "[]", depth)
    elif isinstance(value, dict) and depth and (depth == 4 or role_of(value) is None):
        kinds = {type(inner) for inner in value.values()}
        keys = sum(NUMBER.search(name) is not None or not NAME.fullmatch(name) for name in value)
        is_keyed = len(kinds) == 1 and keys >= len(value) * (1 if str in kinds else 0.5)
        numbered = Counter(NUMBER.sub("*", name) for name in value)
        for name, inner in islice(value.items(), MAX_NAMES if is_keyed else None):
            is_readable = NAME.fullmatch(name) and name not in answers.PROMPTS
            if is_keyed or (is_readable and not NOT_SEARCHED.search(name) and not UNLIKELY.search(name)):
                pattern = NUMBER.sub("*", name)
                shown = "*" if is_keyed else pattern if numbered[pattern] > 1 else name
                yield from _texts_in(inner, f"{path}.{shown}" if path else shown, depth - 1)
