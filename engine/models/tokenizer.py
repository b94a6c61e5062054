"""Convert between text and token ids: the tokenizer of a model, incremental decoding, and chat prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as HubTokenizer

from drafter_service.client.chat_template import Message, RefusedMessagesError, load_chat_template
from drafter_service.client.tokenizer import load_tokenizer
from ssd.errors import UserError

PRIVATE_USE = "\U000f0000"
"""A character that Unicode leaves to applications."""
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""Spelling of a token that is a single byte, in vocabularies of characters that fall back to bytes."""
Decode = Callable[[np.ndarray], str]
"""Returns the text of token ids, uint32 [N]."""
PROMPT_TAIL = 8
"""Number of prompt tokens to decode before the output; some vocabularies drop a space at the start of a text."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Decoded form of bytes that are not a complete character."""
LONG_TEXT = 10_000
"""Number of characters that take about 10 ms to tokenize."""
MAX_HELD, MAX_UNFINISHED = 16, 3
"""Largest number of tokens whose text is held back, and of bytes of an unfinished character."""


class Tokenizer:
    """Tokenizer of one model."""

    def __init__(self, folder: str | Path, shown: Collection[str] = ()) -> None:
        """Load the tokenizer of a model folder or GGUF file. shown: special tokens that decoded texts include.

        Raises UserError if there is no usable tokenizer.
        """
        self._tokenizer = load_tokenizer(folder)
        if any(token.special and token.content in shown for token in self._added().values()):
            self._tokenizer = HubTokenizer.from_str(_without_special(self._tokenizer.to_str(), shown))
        # Files can contain settings from training.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def tokens(self) -> dict[int, str]:
        """Return the vocabulary, added tokens included: the spelling of each token by its id."""
        return {token: spelling for spelling, token in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    def token_ids(self, texts: Collection[str]) -> dict[str, int]:
        """Return the ids of those texts that are added tokens of the vocabulary."""
        return {token.content: number for number, token in self._added().items() if token.content in texts}

    def to_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json, with spellings of added tokens that no text contains.

        With the original spellings, a text that contains one would be encoded as the added token.
        """
        settings = json.loads(self._tokenizer.to_str())
        vocabulary = settings["model"]["vocab"]
        for token in settings["added_tokens"]:
            spelling, token["content"] = token["content"], f"{PRIVATE_USE}{token['id']}"
            if isinstance(vocabulary, dict) and spelling in vocabulary:
                vocabulary[token["content"]] = vocabulary.pop(spelling)
            elif isinstance(vocabulary, list) and token["id"] < len(vocabulary):
                vocabulary[token["id"]][0] = token["content"]
        return json.dumps(settings)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """Return token ids, uint32 [N], by default with the special tokens at the beginning of the model's prompts.

        Raises UserError for a text that UTF-8 cannot encode, such as one made of undecodable bytes.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("the prompt is not valid Unicode; encode it as UTF-8") from None
        if len(text) < LONG_TEXT:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # `encode` keeps other threads from running.
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return np.array(ids, dtype=np.uint32)

    def decode(self, tokens: np.ndarray, *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, uint32 [N], by default without special tokens."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=skip_special_tokens))

    def decode_behind(self, prompt: np.ndarray, tokens: np.ndarray) -> str:
        """Return the text that `tokens` add to `prompt`; some vocabularies drop a space at the start of a text."""
        head, whole = self.decode(prompt), self.decode(np.concatenate((prompt, tokens)))
        return whole[len(head) :] if whole.startswith(head) else self.decode(tokens)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which `decode` leaves out."""
        return frozenset(number for number, token in self._added().items() if token.special)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for within a text; empty for an id that is not in the vocabulary.

        A token may hold a part of a character, so the bytes of consecutive tokens must be joined before they are
        decoded. Those of a special token are its spelling.
        """
        spelling = self._tokenizer.id_to_token(token)
        if spelling is None:
            return b""
        if "ByteLevel" in self._decoders:
            try:
                return bytes(map(BYTES.__getitem__, spelling))
            except KeyError:  # An added token, spelled as in the text.
                return spelling.encode()
        if "ByteFallback" in self._decoders and (byte := BYTE_TOKEN.fullmatch(spelling)):
            return bytes.fromhex(byte[1])
        # Decoded behind another token, since decoders change the beginning of a text.
        ids = [self._anchor, token]
        head, both = (self._tokenizer.decode(ids[:count], skip_special_tokens=False) for count in (1, 2))
        return str(both).removeprefix(str(head)).encode()

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """Types of the decoders that turn tokens into text."""
        return frozenset(_types_in(json.loads(self._tokenizer.to_str())["decoder"]))

    @cached_property
    def _anchor(self) -> int:
        """Id of a token that is a letter or a word."""
        words = (number for number, spelling in sorted(self.tokens().items()) if spelling.isalpha())
        return next(words, 0)

    def _added(self) -> dict[int, AddedToken]:
        return self._tokenizer.get_added_tokens_decoder()


def _without_special(settings: str, shown: Collection[str]) -> str:
    """Return a tokenizer.json in which the tokens of `shown` are not special."""
    parsed = json.loads(settings)
    for token in parsed["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in shown
    return json.dumps(parsed)


def _types_in(decoder: Any) -> Iterator[str]:
    """Yield the type of a decoder in a tokenizer.json and, if it is a sequence, those of its parts."""
    if decoder is not None:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from _types_in(part)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character with which byte-level vocabularies spell tokens, as GPT-2's does.

    Printable characters of Latin-1 stand for themselves, and the first characters beyond it for the other bytes.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTES = _byte_alphabet()


class Detokenizer:
    """Text that an output adds to its prompt, token by token.

    The bytes of a character can span several tokens, so replacement characters at the end are held back until later
    tokens complete them. The `DecodeStream` of `tokenizers` holds back the whole text of such a token and cannot be
    flushed at the end.
    """

    def __init__(self, decode: Decode, prompt: np.ndarray) -> None:
        """prompt: uint32 [P]."""
        self._decode = decode
        self._window: list[int] = _tail(decode, prompt).tolist()
        """The last tokens: those after `_settled`, and some context before them."""
        self._settled = len(self._window)
        """Number of leading tokens of the window whose text was returned."""
        self._returned = len(self._text().rstrip(UNFINISHED))
        """Number of leading characters of the window's text that were returned."""

    def feed(self, token: int) -> str:
        """Append a token and return the text that is now complete."""
        self._window.append(token)
        text, is_long = self._text(), len(self._window) - self._settled > MAX_HELD
        certain = text.rstrip(UNFINISHED)
        if is_long:  # Bytes that are no characters.
            certain = text[: max(len(certain), len(text) - MAX_UNFINISHED)]
        new = certain[self._returned :]
        self._returned = max(self._returned, len(certain))
        if is_long or (new and len(certain) == len(text)):
            held = len(text) - self._returned
            del self._window[: self._settled]
            self._settled = len(self._window)
            self._returned = len(self._text()) - held
        return new

    def finish(self) -> str:
        """Return the text that is held back, after the last token."""
        return self._text()[self._returned :]

    def _text(self) -> str:
        return self._decode(np.array(self._window, np.uint32))


def _tail(decode: Decode, prompt: np.ndarray) -> np.ndarray:
    """Return the last tokens of a prompt; more of them where they end within a character."""
    size = PROMPT_TAIL
    while size < len(prompt) and decode(prompt[-size:]).endswith(UNFINISHED):
        size *= 2
    return prompt[-size:]


class ChatPrompts:
    """Chat template and tokenizer of a model folder."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Raise UserError for an unusable template. A folder without a template is valid but does not support chats."""
        self._template = load_chat_template(folder)
        self._tokenizer = tokenizer

    @property
    def tool_template(self) -> str:
        """The template for chats with tools, in Jinja; empty without a template that uses tools."""
        return "" if self._template is None else self._template.tool_source

    @property
    def takes_tools(self) -> bool:
        """Whether the template uses tools."""
        return bool(self.tool_template)

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt that the template renders.

        tools: that the model may call, as in OpenAI's API. arguments: further variables, such as `enable_thinking`.
        add_generation_prompt: end with the beginning of an answer. continue_final_message: end with the last message.

        Raises UserError for a model without a template, and for messages that are invalid or that it refuses.
        """
        if self._template is None:
            raise UserError(
                "this model has no chat template; send the text of a prompt to /v1/completions, put a "
                "chat_template.jinja into the model's folder, or use a chat model, such as --model smollm2"
            )
        try:
            return self._template.render(
                messages, tools=tools, arguments=arguments, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )  # fmt: skip
        except RefusedMessagesError as problem:
            raise UserError(str(problem)) from None

    def tokens(self, *given: Any, add_special_tokens: bool = False, **options: Any) -> np.ndarray:
        """Return the token ids of `text`, uint32 [N]; templates usually render all special tokens themselves."""
        return self._tokenizer.encode(self.text(*given, **options), add_special_tokens=add_special_tokens)

    def unused(self, names: Iterable[str], *, has_tools: bool) -> list[str]:
        """Return the names that the template does not use as variables. has_tools: whether the chat has tools."""
        if self._template is None:
            return []  # `text` raises the error.
        known = self._template.variables(has_tools=has_tools)
        return [name for name in names if name not in known]
