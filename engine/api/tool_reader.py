"""Read content and tool calls from a whole output.

No text is lost: text that turns out not to be a call becomes content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, NoReturn

MAX_SPACE = 64
"""Largest number of white-space characters that are dropped before a marker. Others are content."""
MAX_NAME = 100
"""Largest length of a name that ends with a marker: 64, and white space around it."""
KEY = re.compile(r'[ \t\r\n]*"([^"\\]*)"[ \t\r\n]*:[ \t\r\n]*')
"""Matches the text before the value of a JSON object's member. Keys of calls need no escapes."""
SPACE = re.compile(r"\s*")


class Call(NamedTuple):
    """A complete call."""

    name: str
    arguments: str
    """A JSON object, as the model wrote it."""


class MalformedCallError(Exception):
    """Raised where the text does not continue as a call."""


class Reader:
    """The text of an output, and the content and calls that were read from it. White space around calls is dropped."""

    def __init__(self, text: str, names: Collection[str], max_calls: int | None = None) -> None:
        """names: names of the tools. Other calls are malformed, and so are calls after the first `max_calls`."""
        self.content = ""
        """Text outside of calls."""
        self.calls: list[Call] = []
        self._text = text
        self._names = names
        self._max_calls = max_calls
        self._position = 0
        """Index of the character to read next."""
        self._mark = 0
        """Index of the first character that is neither content nor part of a call yet."""

    def content_until(self, marker: str) -> bool:
        """Take text as content up to a marker, and read the marker. Without one, return False and take nothing."""
        if (found := self._text.find(marker, self._mark)) < 0:
            return False
        self._take(space_before(self._text, found, self._mark))
        self._position = found + len(marker)
        return True

    def take_rest(self) -> None:
        """Take the rest of the text as content."""
        self._take(len(self._text))

    def attempt(self, read: Callable[[Reader], None]) -> None:
        """Read calls. If one is malformed, take what precedes the text that `read` has begun with as content."""
        start = self._position
        try:
            read(self)
        except MalformedCallError:
            self._take(max(start, self._mark))
        else:
            self._mark = self._after_space(self._mark)

    def sees(self, literal: str) -> bool:
        """Read white space; return whether `literal` follows."""
        self._position = self._after_space(self._position)
        return self._text.startswith(literal, self._position)

    def next_is(self, literal: str) -> bool:
        """Read white space, and `literal` if it follows; return whether it does."""
        is_next = self.sees(literal)
        self._position += len(literal) * is_next
        return is_next

    def expect(self, *literals: str) -> None:
        """Read literals, with white space before each of them. Raises MalformedCallError."""
        if not all(map(self.next_is, literals)):
            raise MalformedCallError

    def close(self, *literals: str) -> None:
        """Read literals after a complete call. A model may leave them out."""
        for literal in literals:
            self.next_is(literal)
        self._mark = self._position

    def name_until(self, marker: str) -> str:
        """Read a name and the marker after it; return the name. Raises MalformedCallError."""
        found = self._text.find(marker, self._position, self._position + MAX_NAME + len(marker))
        if found < 0:
            raise MalformedCallError
        name, self._position = self._text[self._position : found], found + len(marker)
        return name.strip()

    def call(self) -> None:
        """Read a call that is one JSON object with `name`, and `arguments` or `parameters`. Raises MalformedCallError.

        Other keys are ignored.
        """
        members: dict[str, tuple[Any, str]] = {}
        self.expect("{")
        while not self.next_is("}"):
            self.expect(*([","] if members else []))
            key = KEY.match(self._text, self._position)
            if key is None or key[1] in members:
                raise MalformedCallError
            self._position = key.end()
            members[key[1]] = self._value()
        name, _ = members.get("name", (None, ""))
        arguments = [members[key] for key in ("arguments", "parameters") if key in members]
        if len(arguments) != 1 or not isinstance(arguments[0][0], dict):
            raise MalformedCallError
        self._complete(name, arguments[0][1])

    def arguments_of(self, name: str) -> None:
        """Read the arguments of a call whose name was read. Raises MalformedCallError."""
        if not self.sees("{"):
            raise MalformedCallError
        self._complete(name, self._value()[1])

    def _complete(self, name: object, arguments: str) -> None:
        if not isinstance(name, str) or name not in self._names or len(self.calls) == self._max_calls:
            raise MalformedCallError
        self.calls.append(Call(name, arguments))
        self._mark = self._position

    def _value(self) -> tuple[Any, str]:
        """Read a JSON value; return it and its text. Raises MalformedCallError."""
        start = self._position
        try:
            value, self._position = DECODER.raw_decode(self._text, start)
        except (ValueError, RecursionError):
            raise MalformedCallError from None
        return value, self._text[start : self._position]

    def _take(self, end: int) -> None:
        self.content += self._text[self._mark : end]
        self._mark = self._position = end

    def _after_space(self, start: int) -> int:
        space = SPACE.match(self._text, start)
        assert space is not None
        return space.end()


def space_before(text: str, end: int, start: int = 0) -> int:
    """Return the index of the first of at most MAX_SPACE white-space characters between `start` and `end`."""
    tail = text[max(end - MAX_SPACE, start) : end]
    return end - (len(tail) - len(tail.rstrip()))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


DECODER = json.JSONDecoder(parse_int=float, parse_constant=_refuse)
"""Integers of any length are valid; Python refuses to convert long ones."""
