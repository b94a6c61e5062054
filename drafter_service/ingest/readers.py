"""Readers of records: each returns the outputs of the records of some formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from drafter_service.ingest import answers
from drafter_service.ingest.answers import Found, conversation, exchange, outputs_of, prompt_of
from drafter_service.ingest.bodies import body_of, request_of
from drafter_service.ingest.chats import ASSISTANT, Chat, is_chat, parsed, role_of, words
from drafter_service.ingest.documents import BEGAN
from drafter_service.ingest.sessions import NO_ANSWER

MAX_SHAPES = 32
"""Different sets of fields in one file for which facts are kept; a file may have objects keyed by ids."""
Value = dict[str, Any]
Reader = Callable[[Value, list[str]], list[Found] | None]
"""Returns the outputs of a record, and adds a reason for each part that is left out to the list; None if the record
does not have the format."""

REQUESTS = words("request request_body requestBody body req reqPayload proxy_server_request kwargs inputs input")
RESPONSES = words("response response_body responseBody resp respPayload response_obj result outputs output")
OF_BODIES = frozenset(words("choices candidates generations object body role delta messages finish_reason"))
"""Fields by which an object is a request or response of an API."""
COMPLETIONS = words(
    "completion completions response responses generation generations generated_text generated_texts model_output"
    " model_outputs model_response full_model_response raw_output raw_outputs output_text text_output output_list"
    " llm_output actual_output actualOutput generated_answer prediction predictions pred"
)
"""Names of fields with what a model wrote, the most exact ones first."""
OUTPUTS = ("output", "outputs")
"""Names of fields that may also have a reference. They are read only if there is none of the others."""
EXTRACTED = frozenset(words("generated_answer prediction predictions pred"))
"""Those that may have only the answer that was extracted from a longer text or conversation."""
LONGER = re.compile(
    r"code|solution|generat|output|respon|complet|reason|thought|cot$|rationale|traj|^raw_", re.IGNORECASE
)
"""Names of fields with such texts."""
THOUGHTS = words("reasoning reasoning_content thinking scratchpad")
"""Names of fields with the reasoning before an output, perhaps after the part of the output's name before "_"."""
EFFORTS = words("none minimal low medium high xhigh auto on off enabled disabled")
"""Values of fields with these names that are settings of a request."""
CONVERSATIONS = (
    *answers.CHATS,
    *words("traj history trajectory dialogue dialog chat chat_history message_log events aider"),
)
MASKS = words("labels loss_mask assistant_masks completion_mask")
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
OF_PROGRAMS = frozenset(
    words(
        "jsonrpc command cmd exit_code exitCode returncode stdout stderr tool tool_name toolName arguments inputSchema"
    )
)
"""Fields of records of tools (also of their descriptions) and programs, whose results and outputs no model wrote."""
BESIDE_TEXT = frozenset(words("role speaker from sender is_user turn turn_id question query answers"))
"""Fields of records whose text is a turn of somebody, or a passage that is asked about."""
OF_MODELS = frozenset(words("agent generator model model_id usage"))
"""Fields that tell that a model wrote an output without a prompt."""
READABLE = (str, list, dict, np.ndarray, type(None))
NO_RESPONSE = "a request of a batch without its response"
REJECTED = "an answer that is labelled as bad"
SHORTER = "an answer that is extracted from a longer text beside it; name the text with --field"
SCORES = "scores of given answers, which are not outputs"
NOT_SEARCHED = re.compile(
    "prompt|reject|refer|gold|ground|target|expected|judg|grade|demo|example|shot|task|config|tool|^function|args|input"
    "|requests?$|^user|^human(?!.?eval)|question|query|template|metadata|instance|annotat|observ|^id$|_id$|^gt_|model_name",
    re.IGNORECASE,
)
"""Names of fields in which no outputs are searched."""
STEPS = frozenset(
    words(
        "span event tool chain retriever reranker embedding agent guardrail evaluator prompt parser trace invoke_agent"
        " general task function eval score"
    )
)
"""Types of steps in traces that are not calls of a model, or repeat those of others."""
KINDS = words("run_type type event kind span_kind openinference.span.kind gen_ai.operation.name")
"""Fields with the types of records and of steps in traces."""
OPERATIONS = words("chat text_completion generate_content")
"""Values of `gen_ai.operation.name` of calls of a model."""
WRAPPERS = frozenset(words("message tool_call message_content"))
"""Parts of the names of OpenInference's attributes that say what their number stands for."""

TURNS = (
    ("[INST]", "[/INST]"),
    ("<|im_start|>user", "<|im_start|>assistant"),
    ("<|start_header_id|>user", "<|start_header_id|>assistant<|end_header_id|>"),
    ("<|user|>", "<|assistant|>"),
    ("<start_of_turn>user", "<start_of_turn>model"),
    ("### Human:", "### Assistant:"),
    ("### Instruction:", "### Response:"),
)
"""Marks of chat templates with which parts of users, and those of the model, begin."""
TURN_END = re.compile(
    r"</s>|<\|(im_start|im_end|eot_id|end|start_header_id|system|end_?of_?text)\|>|<end_of_turn>|<eos>|### Input:"
)
"""Marks with which other parts begin, or parts end."""

NOT_A_MODEL = "a step of a trace, or a record of a program, that is not a call of a model"


def is_given(value: Value, read: Reader | None = None) -> bool:
    """Return whether a record, or an object in one, says that its text, or what `read` reads, is not a model's."""
    facts = {**about, **value} if isinstance(about := value.get("span_attributes"), dict) else value  # Braintrust
    kinds = [kind.lower() for name in KINDS if isinstance(kind := facts.get(name), str)]
    # Training rows have types, too.
    is_step = not STEPS.isdisjoint(kinds) and read in (request_and_response, COLUMNS[1]) and "instruction" not in value
    # Events of a model may tell of its tools, and of a request and its response.
    kinds = [kind.removeprefix("llm_tool") for kind in kinds if not ("request" in kind and "response" in value)]
    is_named = any(map(GIVEN.search, kinds))
    return is_step or is_named or any(value.get(name) for name in OF_TOOLS)


def response(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read a record that is a response, with its request or without."""
    name = next((name for name in ("choices", "candidates", "output") if record.get(name) is not None), "")
    parts = record.get(name, [record])
    is_response = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
    if name == "output":
        is_response = is_response and parts != [] and all("type" in part for part in parts)
    elif not name:
        is_message = record.get("type") == "message" and role_of(record) == ASSISTANT
        is_body = isinstance(record.get("body"), str) and body_of(record) is not record  # Of HTTP
        is_response = is_message or is_body or role_of(record.get("message")) == ASSISTANT
    return exchange(record, record, skipped, record.get("request_id")) if is_response or name == "candidates" else None


def request_and_response(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read a request and its response, or a step of a trace; not columns of texts."""
    request = next((request_of(record[name], skipped) for name in REQUESTS if record.get(name)), None)
    response = next((body_of(record[name]) for name in RESPONSES if name in record), None)
    first = request[0] if isinstance(request, list) and request else request
    if not isinstance(response, dict) and not isinstance(first, dict | list):
        return None
    if isinstance(response, list) and "status" in record and all(isinstance(part, str) for part in response):
        response = "".join(response)  # Replicate has the pieces of a stream.
    parts = objects_in(response if isinstance(response, list) else [response])
    is_body = any(OF_BODIES & part.keys() or answers.deltas_of(part) is not None for part in parts)
    is_call = isinstance(request, dict) and prompt_of(request) is None  # Of a tool, with its arguments
    if not is_body and (OF_PROGRAMS & record.keys() or (is_call and prompt_of(record) is None)):
        skipped.append(NOT_A_MODEL)
        return []
    if is_call and not is_body and not isinstance(response, dict):
        return None
    if isinstance(response, dict) and isinstance(response.get("message"), dict) and "type" in response:
        response = response["message"]  # Anthropic's batches
    return exchange(record if request is None else request, response, skipped, record.get("request_id"))


def ids(outputs: Iterable[str], prompts: Iterable[str] = ()) -> Reader:
    """Return a reader of token ids in the first of these fields that has some."""

    def read(record: Value, _: list[str]) -> list[Found] | None:
        output = answers.first_ids(record, outputs)
        return None if output is None else [Found(output, answers.first_ids(record, prompts))]

    return read


def masked_ids(record: Value, _: list[str]) -> list[Found] | None:
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


def lm_eval(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read the samples of lm-eval, whose prompt is within the arguments of the request."""
    prompt: object = record.get("arguments")
    while isinstance(prompt, list | dict) and prompt and not is_chat(prompt):
        prompt = body_of(next(iter(prompt.values())) if isinstance(prompt, dict) else prompt[0])
    samples = record.get("resps") or record.get("filtered_resps") or []
    samples = samples if isinstance(samples, list) else []
    texts = [text for one in samples for text in (one if isinstance(one, list) else [one])]
    if not all(isinstance(text, str) for text in texts):
        skipped.append(SCORES)
        return []
    return exchange(prompt, texts, skipped)


def chosen(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read the better one of two answers."""
    chosen = body_of(record.get("chosen") or record.get("chosen_messages"))
    prompt = prompt_of(record)
    if isinstance(chosen, str) and prompt is None:  # Conversations of HH-RLHF
        before, mark, answer = chosen.rpartition("\n\nAssistant:")
        return exchange(before + mark, answer.strip(), skipped)
    if isinstance(chosen, list) and len(chosen) > 1 and is_chat(chosen):
        return (conversation(chosen, record, skipped) or [])[-1:]
    if isinstance(chosen, list) and any(isinstance(part, str) for part in chosen):  # A dictionary of words
        return None
    return [Found(output, prompt) for output in outputs_of(chosen, skipped)]


def bfcl(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read a text, calls such as {"name": "{...}"}, or lists of these: the steps in each turn."""
    result = record["result"]
    if isinstance(result, list) and all(isinstance(one, dict) and len(one) == 1 for one in result):
        calls = [{"name": name, "arguments": arguments} for one in result for name, arguments in one.items()]
        result = {"role": ASSISTANT, "tool_calls": calls}
    elif isinstance(result, list):
        return [found for one in result for found in bfcl({"result": one}, skipped) or []]
    return [Found(output) for output in outputs_of(result, skipped)]


def columns(names: Iterable[str]) -> Reader:
    """Return a reader of rows with an output in the first of these fields that has one."""

    def read(record: Value, skipped: list[str]) -> list[Found] | None:
        present = [name for name in names if name in record and isinstance(record[name], READABLE)]
        name = next((name for name in present if record[name] is not None and len(record[name])), None)
        is_task = names is not COMPLETIONS and TASK & record.keys() and "is_solved" not in record
        if not present or is_task:
            return None
        if name is None:
            is_null = not FAILED & record.keys() and all(record[name] is None for name in present)  # In a table
            return None if is_null else []
        if names is OUTPUTS and OF_PROGRAMS & record.keys():
            skipped.append(NOT_A_MODEL)
            return []
        if _is_extracted(record, name):
            skipped.append(SHORTER)
            return []
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
        is_text = all(isinstance(output, str) for output in outputs)
        if names is OUTPUTS and prompt is None and is_text and OF_MODELS.isdisjoint(record):
            return None
        thoughts = _thoughts(record, name)
        thoughts = thoughts if isinstance(thoughts, list) else [thoughts]
        texts = value if isinstance(value, list) and len(value) == len(thoughts) else outputs
        if len(texts) == len(thoughts) and all(isinstance(part, str | None) for part in (*texts, *thoughts)):
            pairs = [(text, thought) for text, thought in zip(texts, thoughts, strict=True) if text]
            messages = [{"role": ASSISTANT, "content": text, "reasoning": thought} for text, thought in pairs]
            outputs = [output for message in messages for output in outputs_of(message, skipped)]
        several = next((record[key] for key in ("prompts", "inputs", "input_texts", "requests") if key in record), None)
        if isinstance(several, list) and len(several) == len(outputs):
            return [Found(output, prompt_of(one)) for output, one in zip(outputs, several, strict=True)]
        return [Found(output, prompt) for output in outputs]

    return read


def _thoughts(record: Value, name: str) -> Any:
    """Return the reasoning, a text or a list, before the output in a field; [] without one."""
    own = [f"{name.rpartition('_')[0]}_{thought}" for thought in THOUGHTS]
    values = (record.get(key) for key in (*own, *THOUGHTS))
    return next((value for value in values if isinstance(value, str | list) and value not in EFFORTS), [])


def _is_extracted(record: Value, name: str) -> bool:
    """Return whether a field has an answer that was extracted from the longer text in another field."""
    if name not in EXTRACTED:
        return False
    texts = [_first_text(record[other]) for other in _longer(tuple(record)) if other != name]
    return any(2 * len(str(record[name])) < len(longer) for longer in texts)


@lru_cache(MAX_SHAPES)
def _longer(names: tuple[str, ...]) -> list[str]:
    """Return the names of fields that may have texts from which answers are extracted."""
    return [name for name in names if LONGER.search(name) and not NOT_SEARCHED.search(name)]


def _first_text(value: object) -> str:
    while isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else ""


def _is_rejected(record: Value, skipped: list[str]) -> bool:
    """Return whether a row, as of KTO, has an answer that is not wanted, and note it."""
    is_rejected = record.get("label") is False or record.get("kto_tag") is False
    skipped += [REJECTED] if is_rejected else []
    return is_rejected


def messages(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read a conversation."""
    for name in CONVERSATIONS:
        chat: Any = parsed(record.get(name))
        if "uid" in record and is_chat(chat):  # Arena-Hard has answers as objects.
            contents = [one.get("content") for one in chat]
            texts = [content.get("answer", content) if isinstance(content, dict) else content for content in contents]
            chat = [{**one, "content": text} for one, text in zip(chat, texts, strict=True)]
        notes: list[str] = []
        if (found := conversation(chat, record, notes)) is not None:
            if _is_rejected(record, skipped):
                return []
            skipped += notes if found or notes else [NO_ANSWER]
            return found
    return None


def objects_in(values: object) -> list[Value]:
    """Return the objects in a list; [] for other values."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def text(record: Value, _: list[str]) -> list[Found] | None:
    """Read a text that is neither a task nor a message nor an event, or the model's parts of a rendered chat."""
    written = record["text"]
    is_event = isinstance(record.get("type"), str) and not record.keys().isdisjoint(BEGAN)
    is_event = is_event or isinstance(record.get("event"), str)
    is_text = isinstance(written, str) and written and not is_event and not TASK & record.keys()
    if not is_text or BESIDE_TEXT & record.keys() or is_chat([record]):
        return None
    # Searching a single character first takes a tenth of the time.
    possible = (turns for turns in TURNS if turns[0][0] in written)
    turns = next((turns for turns in possible if turns[1] in written and turns[0] in written), None)
    if turns is None:
        is_question = "question_id" in record and OF_MODELS.isdisjoint(record)  # Of Vicuna and MT-Bench
        return None if is_question or "label" in record or "labels" in record else [Found(written)]
    user, model = turns
    pieces = written.split(model)
    parts = [TURN_END.split(piece.partition(user)[0], maxsplit=1)[0].strip() for piece in pieces]
    return [Found(part, model.join([*pieces[:index], ""])) for index, part in enumerate(parts) if index and part]


def unanswered(_: Value, skipped: list[str]) -> list[Found]:
    """Read a request of a batch."""
    skipped.append(NO_RESPONSE)
    return []


def span(record: Value, skipped: list[str]) -> list[Found] | None:
    """Read a span of a trace that is a call of a model."""
    fields = record.get("attributes", record)
    if isinstance(fields, list):  # OTLP
        pairs = [pair for pair in objects_in(fields) if isinstance(pair.get("value"), dict)]
        fields = {str(pair.get("key")): next(iter(pair["value"].values()), None) for pair in pairs}
    if not isinstance(fields, dict):
        return None
    kind = str(fields.get("openinference.span.kind", record.get("span_kind", ""))).lower()
    operation, identity = fields.get("gen_ai.operation.name", "chat"), str(fields.get("ai.operationId", ".doStream"))
    if kind in STEPS or operation not in OPERATIONS or not identity.endswith((".doGenerate", ".doStream")):
        skipped.append(NOT_A_MODEL)
        return []
    text = next((fields[name] for name in ("ai.response.text", "ai.response.object") if fields.get(name)), "")
    if calls := parsed(fields.get("ai.response.toolCalls")):
        text = {"role": ASSISTANT, "content": text, "tool_calls": calls}
    before: object = parsed(fields.get("gen_ai.input.messages", fields.get("ai.prompt.messages")))
    after = parsed(fields.get("gen_ai.output.messages")) or _attributes(fields, "llm.output_messages") or text
    after = after or _attributes(fields, "gen_ai.completion")  # OpenLLMetry
    if not after:
        return [] if kind == "llm" or "gen_ai.operation.name" in fields else None
    before = before or _attributes(fields, "llm.input_messages") or _attributes(fields, "gen_ai.prompt")
    return exchange(before, after, skipped)


def _attributes(fields: Value, prefix: str) -> object:
    """Return the list whose elements have attributes of their own, such as "PREFIX.0.message.content"."""
    attributes: Value = {}
    for name in (name for name in fields if name.startswith(f"{prefix}.")):
        path = name[len(prefix) + 1 :].replace("contents", "content").split(".")
        attributes[".".join(part for part in path if part not in WRAPPERS)] = fields[name]
    return _nested(attributes) or fields.get(prefix)


def _nested(fields: Value) -> Any:
    """Return fields with names such as "a.0.b" as objects and lists."""
    if "" in fields:
        return fields[""]
    parts: dict[str, Value] = {}
    for name, value in fields.items():
        first, _, rest = name.partition(".")
        parts.setdefault(first, {})[rest] = value
    tree = {name: _nested(inner) for name, inner in parts.items()}
    return [tree[name] for name in sorted(tree, key=int)] if tree and all(map(str.isdecimal, tree)) else tree


COLUMNS = (columns(COMPLETIONS), columns(OUTPUTS), columns(("answer",)))
ALL_IDS = ids(("tokens", "input_ids"))
WEAK = (request_and_response, *COLUMNS, text)
"""Readers of fields that steps without a model have, too."""
