"""Convert text to token ids, with the tokenizer and the chat template of a model folder."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from drafter_service.client.chat_template import RefusedMessagesError, load_chat_template
from drafter_service.ingest.chats import Chat, Message, plain_text
from drafter_service.ingest.documents import RecordError
from ssd.errors import UserError, missing_extra

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
CHARS_AT_ONCE = 1 << 18
"""Characters per call of the library: it needs hundreds of bytes per token, but uses fewer threads for small calls."""
REFUSED = "messages that the model's chat template refuses"
WITHOUT = "the messages of a prompt are concatenated"


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model folder.

    Raises UserError if the folder has no usable tokenizer.json, or the tokenizers library is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise missing_extra("--tokenizer needs tokenizers", "text") from None

    path = folder / TOKENIZER_FILE
    if not path.exists():
        raise UserError(f"--tokenizer: {folder} has no {TOKENIZER_FILE}; give the folder of a model")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as problem:  # The library raises bare exceptions.
        raise UserError(f"--tokenizer: {path} cannot be read ({problem}); download it again") from None


class Vocabulary:
    """Tokenizer and chat template of one model. Any thread may use it."""

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer of a model folder; errors as in `load_tokenizer`."""
        self._tokenizer = load_tokenizer(folder)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.chat = ChatFormatter(folder)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, uint32 [N], without special tokens around it."""
        return [
            np.frombuffer(array("I", encoding.ids), np.uint32)
            for group in _groups(texts)
            for encoding in self._tokenizer.encode_batch_fast(group, add_special_tokens=False)
        ]


def _groups(texts: list[str]) -> Iterator[list[str]]:
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
