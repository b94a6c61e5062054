"""Convert text to token ids, with the tokenizer and the chat template of a model folder."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from drafter_service.client.chat_template import RefusedMessagesError, load_chat_template
from drafter_service.client.tokenizer_file import load_tokenizer
from drafter_service.ingest.chats import Chat, Message, plain_text
from drafter_service.ingest.documents import RecordError
from ssd.errors import UserError

CHARS_AT_ONCE = 1 << 18
"""Characters per call of the library: it needs hundreds of bytes per token, but uses fewer threads for small calls."""
SEAM = re.compile(r"(?<=[^\W\d_])(?=[^\w'\u2019]\w)")
"""Places where texts may be split: before a character that is neither of a word nor an apostrophe, between words."""
SEAM_CHARS = 128
"""Characters on both sides of a seam whose tokens must be the same when they are split."""
SEAMS_TRIED = 50
REFUSED = "messages that the model's chat template refuses"
WITHOUT = "the messages of a prompt are concatenated"


class Vocabulary:
    """Tokenizer and chat template of one model. Any thread may use it."""

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer of a model folder; errors as in `load_tokenizer`."""
        self._tokenizer = load_tokenizer(folder)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.chat = ChatFormatter(folder)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, uint32 [N], without special tokens around it.

        Long texts are tokenized in pieces, where that gives the same tokens.
        """
        pieces = [list(self._pieces(text)) for text in texts]
        encoded = (
            np.frombuffer(array("I", encoding.ids), np.uint32)
            for group in _groups(piece for of_text in pieces for piece in of_text)
            for encoding in self._tokenizer.encode_batch_fast(group, add_special_tokens=False)
        )
        parts = ([next(encoded) for _ in of_text] for of_text in pieces)
        return [part[0] if len(part) == 1 else np.concatenate(part) for part in parts]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of token ids, special tokens included."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield parts of a text that are tokenized as the whole text is.

        The last part is long if the tokenizer cannot be split. A text without words is split anywhere.
        """
        first = 0
        while len(text) - first > 2 * CHARS_AT_ONCE and (seam := self._seam(text, first + CHARS_AT_ONCE)):
            end, following = seam
            yield text[first:end]
            first = following
        yield text[first:]

    def _seam(self, text: str, first: int) -> tuple[int, int] | None:
        """Return the end of a piece and the beginning of the next; None if pieces have other tokens than the whole.

        A tokenizer that adds a space before each text has one character less between them.
        """
        at = None
        for match in islice(SEAM.finditer(text, first, first + CHARS_AT_ONCE), SEAMS_TRIED):
            at = match.start()
            before, after = text[at - SEAM_CHARS : at], text[at : at + SEAM_CHARS]
            whole, left = (self._ids(part) for part in (before + after, before))
            for dropped in (0, 1) if after[0] == " " else (0,):
                if left + self._ids(after[dropped:]) == whole:
                    return at, at + dropped
        return (first, first) if at is None else None

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield groups of texts, each for one call of the library."""
    group: list[str] = []
    chars = 0
    for text in texts:
        group.append(text)
        chars += len(text)
        if chars >= CHARS_AT_ONCE:
            yield group
            group, chars = [], 0
    if group:
        yield group


class ChatFormatter:
    """The chat template of a model folder. Without one, messages are concatenated."""

    def __init__(self, folder: Path) -> None:
        self.note: str | None = None
        """Message to the user about why there is no template."""
        self.was_missing = False
        """Whether messages were concatenated because there is no template."""
        try:
            self._template = load_chat_template(folder)
            if self._template is None:
                self.note = f"{folder} has no chat template; {WITHOUT}"
        except UserError as problem:
            self._template = None
            self.note = f"{problem}; {WITHOUT}"

    def prompt_text(self, chat: Chat) -> str:
        """Return the text of the model's input before its answer. Raises RecordError."""
        if self._template is None:
            self.was_missing = True
            return "".join(f"{plain_text(message)}\n" for message in chat.messages)
        return self._render(chat, True)

    def reply_text(self, chat: Chat | None, message: Message) -> str:
        """Return the text that the model wrote if it was parsed as `message` after `chat`. Raises RecordError."""
        if self._template is None or chat is None:
            return plain_text(message)
        prompt = self._render(chat, True)
        whole = self._render(chat._replace(messages=[*chat.messages, message]), False)
        text = whole[len(prompt) :] if whole.startswith(prompt) else ""
        # Some templates leave out the reasoning, which the model wrote nevertheless.
        return text if text and message.get("reasoning_content", "").strip() in text else plain_text(message)

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
