"""Options of a load, and the conversion of records and texts to documents, with the tokenizer of a model folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import numpy as np

from drafter_service.client.chat_template import RefusedMessagesError, load_chat_template
from drafter_service.client.tokenizer import TextTokenizer
from drafter_service.ingest.answers import Found, Output
from drafter_service.ingest.chats import ASSISTANT, USER, Chat, Message, Reply, plain_text
from drafter_service.ingest.documents import (
    NO_TOKENIZER,
    NO_TOKENS,
    Documents,
    Faults,
    Item,
    Origin,
    Part,
    RecordError,
    Sample,
    origin_of,
)
from drafter_service.ingest.formats import Requests
from drafter_service.ingest.sessions import Read
from ssd.config import DrafterConfig
from ssd.errors import UserError
from ssd.types import offsets_of

BLOCK_BYTES = 1 << 20
PREFIX_TOKENS = DrafterConfig.learned_prompt_tokens
PREFIX_CHARS = 32 * PREFIX_TOKENS
"""Number of last characters of a prompt in which `PREFIX_TOKENS` tokens fit. Tokenizing whole prompts is slow."""
COUNTER = re.compile(r"((chat)?cmpl-)?\w{1,4}", re.ASCII)
"""Ids that are not unique: Ollama's and KoboldCpp's, and numbers of requests that each run of a program counts anew."""
REFUSED = "messages that the model's chat template refuses"
THOUGHT = re.compile(r"<think>\s*(</think>\s*)?$")
"""Beginning of the reasoning, or an empty one, at the end of prompts, which some templates do not render in answers."""
THOUGHT_TAG = re.compile(r"</?think>(\s*)$")


class Vocabulary(TextTokenizer):
    """Tokenizer and chat template of one model. Any thread may use it."""

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer and the template of a model folder; errors as in `load_tokenizer`."""
        super().__init__(folder)
        self.chat = ChatFormatter(folder)


class ChatFormatter:
    """The chat template of a model folder. Without one, messages are concatenated."""

    def __init__(self, folder: Path) -> None:
        self.note: str | None = None
        """Message to the user, once texts are not those of a template."""
        self._template, self._problem = None, f"{folder} has no chat template"
        self._unrendered = 0
        """Number of answers that the template cannot render."""
        try:
            self._template = load_chat_template(folder)
        except UserError as problem:
            self._problem = str(problem)

    def prompt_text(self, chat: Chat) -> str:
        """Return the text of the model's input before its answer. Raises RecordError."""
        if self._template is None:
            self.note = f"{self._problem}; the messages of a prompt are concatenated"
            return "".join(f"{plain_text(message)}\n" for message in chat.messages)
        return self._render(chat, True)

    def prompt_end(self, chat: Chat) -> str:
        """Return the last `PREFIX_CHARS` characters of `prompt_text`, in a time that does not grow with the chat."""
        return self._shortened(chat)[1][-PREFIX_CHARS:]

    def reply_text(self, chat: Chat | None, message: Message) -> str:
        """Return the text that the model wrote if it was parsed as `message` after `chat`, or after any chat if None.

        If the template does not render a call, or refuses the messages, it is the text without a template.
        """
        if self._template is None:
            return plain_text(message)
        with suppress(RecordError):
            if text := self._rendered(chat or Chat([{"role": USER, "content": ""}]), message):
                return text
        self._unrendered += 1
        self.note = (
            "answers with reasoning or calls that the chat template does not render: "
            f"{self._unrendered:,}; they are read as text and JSON"
        )
        return plain_text(message)

    def _rendered(self, chat: Chat, message: Message) -> str:
        """Return the text of an answer, after its reasoning if the template leaves that out; "" without all calls."""
        chat, prompt = self._shortened(chat)

        def answer(**fields: object) -> str:
            messages = [*chat.messages, {**bare, **fields}]
            whole = self._render(chat._replace(messages=messages), False)
            before = prompt if whole.startswith(prompt) else THOUGHT.sub("", prompt)
            text = whole[len(before) :] if whole.startswith(before) else ""
            return text if _has_calls(text, message) else ""

        bare = {name: value for name, value in message.items() if name != "reasoning_content"}
        reasoning = message.get("reasoning_content", "")
        if not (thoughts := reasoning.strip()):
            return answer()
        with suppress(RecordError):  # gpt-oss's template refuses reasoning beside a text and calls.
            if thoughts in (text := answer(reasoning_content=reasoning, thinking=reasoning)):
                return text
        tag = THOUGHT_TAG.search(prompt)
        line = "\n" if tag is None or tag[1] else ""
        end = f"{line}</think>{2 * line}" if tag else 2 * line
        return f"{thoughts}{end}{text.removeprefix('</think>')}" if (text := answer()) else ""

    def _shortened(self, chat: Chat) -> tuple[Chat, str]:
        """Return a chat without messages long before its end, unless the template refuses that, and its prompt.

        Raises RecordError.
        """
        with suppress(RecordError):
            short = without_beginning(chat)
            return short, self.prompt_text(short)
        return chat, self.prompt_text(chat)

    def _render(self, chat: Chat, for_answer: bool) -> str:
        assert self._template is not None
        try:
            return self._template.render(
                chat.messages,
                tools=chat.tools,
                add_generation_prompt=for_answer,
                arguments=chat.template_arguments,
            )
        except RefusedMessagesError:  # Its message may contain text of users.
            raise RecordError(REFUSED) from None


def _has_calls(text: str, message: Message) -> bool:
    """Return whether a rendered text has the name of each call of a message, beside its content and reasoning."""
    rest = text
    for name in ("content", "reasoning_content"):
        rest = rest.replace(message.get(name, "").strip(), "", 1)
    names = [re.escape(call["function"]["name"]) for call in message.get("tool_calls", ())]
    return all(re.search(rf"(?<!\w){name}(?!\w)", rest) for name in names)


@dataclass(frozen=True)
class Reading:
    """Options of a load, and counts of what it finds."""

    vocabulary: Vocabulary | None = None
    fields: tuple[str, ...] = ()
    """Fields to read in a record, the output last; empty: the known fields."""
    for_replay: bool = False
    """Whether documents have whole prompts instead of their ends, and times, users and sessions."""
    block_bytes: int = BLOCK_BYTES
    """Approximate size of a chunk."""
    as_text: bool = False
    """Whether all files that are not binary are learned as they are."""
    requests: Requests = field(default_factory=dict)
    """Requests of batches whose responses have not been read, by their `custom_id`."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Number of files by container."""
    faults: Faults = field(default_factory=Faults)
    samples: dict[str, Sample] = field(default_factory=dict)
    """Documents by format."""
    digests: dict[int, int] = field(default_factory=dict)
    """By the hash of an id, the digest of the first document that has it."""
    counts: Counter[int] = field(default_factory=Counter)
    """Number of documents without an id, by their digest."""

    @property
    def note(self) -> str | None:
        """Message to the user about what was read."""
        return self.vocabulary.chat.note if self.vocabulary else None

    def items_of(self, read: Read) -> list[Item]:
        """Return the documents of a record, and count what is left out of it."""
        place = read.record.place
        for reason in read.skipped:
            self.faults.record(reason, place)
        origin = self._origin(read) if self.for_replay else None
        items = []
        for index, found in enumerate(read.outputs):
            try:
                items.append(self._item(found, place, origin)._replace(name=self._name(found, index)))
            except RecordError as problem:
                self.faults.record(str(problem), place)
        self.sample(read.format, items)
        return items

    def sample(self, name: str, items: Sequence[Item]) -> None:
        """Count documents of a format, and keep the first ones."""
        if items:
            self.samples.setdefault(name, Sample(items[0]._replace(prompt=None, output=""))).add(items)

    def prefix_of(self, prompt: np.ndarray) -> np.ndarray:
        """Return the tokens of a prompt to learn, as a copy that does not keep the others in memory."""
        return prompt if self.for_replay else prompt[-PREFIX_TOKENS:].copy()

    def _origin(self, read: Read) -> Origin:
        """Return the origin of a record; a conversation is a session, unless the record names one."""
        origin = origin_of(read.record.value)
        lengths = {len(one.prompt.messages) if isinstance(one.prompt, Chat) else 0 for one in read.outputs}
        # With prompts of one length they are answers to the same prompt.
        return origin._replace(session=read.record.place) if origin.session is None and len(lengths) > 1 else origin

    def named(self, item: Item) -> Item:
        """Return an item that is no record with its name."""
        return item if item.name else item._replace(name=self._by_content(_digest_of(item.prompt, item.output)))

    def _name(self, found: Found, index: int) -> str:
        """Return the id of a request, followed by a digest if another document of this load has it; by content without.

        index: number of the output among those of its record.
        """
        digest = _digest_of(found.prompt, found.output)
        if found.request is None or COUNTER.fullmatch(found.request):
            return self._by_content(digest)
        name = f"{found.request}/{index}" if index else found.request
        is_first = self.digests.setdefault(hash(name), digest) == digest
        return name if is_first else f"{name}#{digest:016x}"

    def _by_content(self, digest: int) -> str:
        """Return the name of a document without an id: the same one in each load, and another for each equal document.

        So a log that was moved or has grown is recognized, and new text at the place of known text is learned.
        """
        number = self.counts[digest]
        self.counts[digest] += 1
        return f"{digest:016x}/{number}" if number else f"{digest:016x}"

    def _item(self, found: Found, place: str, origin: Origin | None) -> Item:
        prompt, output = self._prompt(found.prompt), found.output
        if isinstance(output, Reply):
            chat = found.prompt if isinstance(found.prompt, Chat) else None
            texts = self.vocabulary.chat if self.vocabulary else None
            output = texts.reply_text(chat, output.message) if texts else plain_text(output.message)
        return Item(place, prompt, output, origin)

    def _prompt(self, prompt: Part | Chat | None) -> Part | None:
        if isinstance(prompt, np.ndarray):
            return self.prefix_of(prompt)
        if prompt is None or self.vocabulary is None:
            return None
        if isinstance(prompt, Chat):
            chats = self.vocabulary.chat
            return chats.prompt_text(prompt) if self.for_replay else chats.prompt_end(prompt)
        return prompt if self.for_replay else prompt[-PREFIX_CHARS:]


def _digest_of(prompt: Part | Chat | None, output: Output) -> int:
    """Return a 64-bit digest of an output and the end of its prompt, as the log has them.

    Texts that a chat template renders may have the date.
    """
    if isinstance(prompt, Chat):
        prompt = "\n".join(map(plain_text, _end_of(prompt.messages)))
    digest = blake2b(digest_size=8)
    prompt = None if prompt is None else prompt[-(PREFIX_CHARS if isinstance(prompt, str) else PREFIX_TOKENS) :]
    for part in (prompt, plain_text(output.message) if isinstance(output, Reply) else output):
        data = part.tobytes() if isinstance(part, np.ndarray) else (part or "").encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest())


def _end_of(messages: list[Message]) -> list[Message]:
    """Return the last messages, from one of the assistant on, that have `PREFIX_CHARS` characters; else all."""
    first, chars = len(messages), 0
    while first and (chars < PREFIX_CHARS or messages[first]["role"] != ASSISTANT):
        first -= 1
        chars += len(messages[first]["content"])
    return messages[first:]


def without_beginning(chat: Chat) -> Chat:
    """Return a chat without the messages that are not in the last `PREFIX_CHARS` characters of its text.

    It keeps what templates expect before the first message of the assistant: one of the user, which may have the tools.
    """
    last = _end_of(chat.messages)
    others = chat.messages[: len(chat.messages) - len(last)]
    user = (message for message in others if message["role"] == USER)
    return chat._replace(messages=[*islice(user, 1), *last]) if others else chat


def tokenize(items: Sequence[Item], reading: Reading) -> Iterator[tuple[Item, np.ndarray, np.ndarray]]:
    """Yield the items that have output tokens, with their prompts (maybe empty) and outputs, uint32 [N] each.

    Counts the others.
    """
    if reading.vocabulary is None:
        for item in items:
            if isinstance(item.output, str):
                reading.faults.record(NO_TOKENIZER, item.place)
        items = [item for item in items if not isinstance(item.output, str)]
    texts = [part for item in items for part in (item.prompt, item.output) if isinstance(part, str)]
    encoded = iter(reading.vocabulary.encode(texts) if reading.vocabulary else ())
    for item in items:
        prompt = next(encoded) if isinstance(item.prompt, str) else item.prompt
        output = next(encoded) if isinstance(item.output, str) else item.output
        if len(output):
            yield item, output[:0] if prompt is None else prompt, output
        else:
            reading.faults.record(NO_TOKENS, item.place)


def encode(items: Sequence[Item], reading: Reading) -> Documents:
    """Tokenize items and return them as documents, in order, without those that have no output tokens."""
    found = [(item, reading.prefix_of(prompt), output) for item, prompt, output in tokenize(items, reading)]
    parts = [part for _, prefix, output in found for part in (prefix, output)]
    lengths = np.array([len(part) for part in parts], np.int64).reshape(-1, 2)
    return Documents(
        np.concatenate(parts) if parts else np.empty(0, np.uint32),
        offsets_of(lengths.sum(axis=1)),
        [item.name for item, *_ in found],
        np.array([item.time for item, *_ in found], np.float64),
        np.array([item.tag for item, *_ in found], np.uint32),
    )
