"""Read tool calls from an output while it arrives.

A format reads an output with a generator that yields wherever it needs more text, so that its code can be that of a
parser of the whole text. Content and calls do not depend on how the text was divided.

No text is lost: text that turns out not to be a call becomes content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator
from typing import Any, NamedTuple, NoReturn, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields while it needs more text, then returns a value."""

MAX_SPACE = 64
"""Largest number of white-space characters that are dropped before a marker. Others are content."""
MAX_NAME = 100
"""Largest length of a name that ends with a marker: 64, and white space around it."""
MEMBER = re.compile(r'[ \t\r\n]*[{,][ \t\r\n]*"([^"\\]*)"[ \t\r\n]*:[ \t\r\n]*')
"""Matches the text before the value of a JSON object's member. Keys of calls need no escapes."""
SPACE = re.compile(r"\s*")
OUTSIDE_STRINGS = re.compile(r'[^"{}\[\]]+|["{}\[\]]')
IN_STRING = re.compile(r'(?:[^"\\]|\\.)+|"', re.DOTALL)
"""Match the next part of a JSON object, whose syntax they do not check. No match: more text is needed."""
END_OF_MEMBERS = re.compile(r"[ \t\r\n]*\}")


class Call(NamedTuple):
    """A complete call."""

    name: str
    arguments: str
    """A JSON object, as the model wrote it."""


class MalformedCallError(Exception):
    """Raised where the text does not continue as a call."""


class Reader:
    """The text of an output, and the content and calls that were read from it.

    Formats use its methods that return `Steps`. White space around calls is dropped.
    """

    def __init__(self, names: Collection[str], max_calls: int | None = None) -> None:
        """names: names of the tools. Other calls are malformed, and so are calls after the first `max_calls`."""
        self.calls: list[Call] = []
        """Calls that were read."""
        self._content = ""
        """Text outside of calls that was not taken yet."""
        self._has_ended = False
        """Whether no more text follows."""
        self._names = names
        self._max_calls = max_calls
        self._text = ""
        self._position = 0
        """Index of the character to read next."""
        self._mark = 0
        """Index of the first character that is neither content nor part of a call yet."""
        self._follows_call = False

    def add(self, text: str, *, is_last: bool) -> None:
        """Append text to the output; is_last: no more follows."""
        self._text += text
        self._has_ended = is_last

    def take_content(self) -> str:
        """Return the content since the last call of this method."""
        content, self._content = self._content, ""
        return content

    def content_until(self, marker: str | None) -> Steps[bool]:
        """Pass text on as content up to a marker, and read the marker. Return False at the end of the output.

        marker: None to pass on the whole rest.
        """
        if self._follows_call:
            self._mark = yield from self._after_space(self._mark)
        while True:
            if marker is not None and (found := self._text.find(marker, self._mark)) >= 0:
                self._pass_on(self._before_space(found))
                self._position = found + len(marker)
                return True
            if self._has_ended:
                self._pass_on(len(self._text))
                return False
            self._pass_on(self._certain_content(marker))
            self._text = self._text[self._mark :]
            self._mark = 0
            yield

    def attempt(self, steps: Steps[None]) -> Steps[None]:
        """Read calls. If one is malformed, pass on its text as content, up to where it was read."""
        try:
            yield from steps
        except MalformedCallError:
            self._pass_on(self._position)

    def sees(self, literal: str) -> Steps[bool]:
        """Read white space; return whether `literal` follows."""
        self._position = yield from self._after_space(self._position)
        while not self._text.startswith(literal, self._position):
            if self._has_ended or not literal.startswith(self._text[self._position : self._position + len(literal)]):
                return False
            yield
        return True

    def next_is(self, literal: str) -> Steps[bool]:
        """Read white space, and `literal` if it follows; return whether it does."""
        is_next = yield from self.sees(literal)
        self._position += len(literal) * is_next
        return is_next

    def expect(self, *literals: str) -> Steps[None]:
        """Read literals, with white space before each of them. Raises MalformedCallError."""
        for literal in literals:
            if not (yield from self.next_is(literal)):
                raise MalformedCallError

    def close(self, *literals: str) -> Steps[None]:
        """Read literals after a complete call. A model may leave them out, and the output may end within one."""
        for literal in literals:
            is_next = yield from self.next_is(literal)
            if not is_next and self._has_ended and literal.startswith(self._text[self._position :]):
                self._position = len(self._text)
        self._mark = self._position

    def name_until(self, marker: str) -> Steps[str]:
        """Read a name and the marker after it; return the name. Raises MalformedCallError."""
        limit = self._position + MAX_NAME + len(marker)
        while (found := self._text.find(marker, self._position, limit)) < 0:
            if len(self._text) >= limit:
                raise MalformedCallError
            yield from self._more()
        name, self._position = self._text[self._position : found], found + len(marker)
        return name.strip()

    def call(self) -> Steps[None]:
        """Read a call that is one JSON object with `name`, and `arguments` or `parameters`. Raises MalformedCallError.

        Other keys are ignored.
        """
        text = yield from self._object()
        members = _members(text)
        name, _ = members.get("name", (None, ""))
        arguments = [members[key] for key in ("arguments", "parameters") if key in members]
        if len(arguments) != 1 or not isinstance(arguments[0][0], dict):
            raise MalformedCallError
        self._complete(name, arguments[0][1])

    def arguments_of(self, name: str) -> Steps[None]:
        """Read the arguments of a call whose name was read. Raises MalformedCallError."""
        text = yield from self._object()
        _value(text, 0)
        self._complete(name, text)

    def _object(self) -> Steps[str]:
        """Read white space and a JSON object; return its text, which may be invalid. Raises MalformedCallError."""
        if not (yield from self.sees("{")):
            raise MalformedCallError
        start = end = self._position
        depth, is_in_string = 0, False
        while depth or end == start:
            part = (IN_STRING if is_in_string else OUTSIDE_STRINGS).match(self._text, end)
            if part is None:
                yield from self._more()
                continue
            if not is_in_string:
                depth += (part[0] in "{[") - (part[0] in "}]")
            is_in_string ^= part[0] == '"'
            end = part.end()
        self._position = end
        return self._text[start:end]

    def _complete(self, name: object, arguments: str) -> None:
        if not isinstance(name, str) or name not in self._names or len(self.calls) == self._max_calls:
            raise MalformedCallError
        self.calls.append(Call(name, arguments))
        self._follows_call = True
        self._mark = self._position

    def _pass_on(self, end: int) -> None:
        if end > self._mark:
            self._content += self._text[self._mark : end]
            self._follows_call = False
        self._mark = self._position = end

    def _certain_content(self, marker: str | None) -> int:
        """Return the length of the text that cannot belong to a marker or to white space before one."""
        if marker is None:
            return len(self._text)
        size = next(size for size in range(len(marker) - 1, -1, -1) if self._text.endswith(marker[:size]))
        return self._before_space(max(self._mark, len(self._text) - size))

    def _before_space(self, end: int) -> int:
        """Return the index of the first of at most MAX_SPACE white-space characters before `end`, of the new text."""
        tail = self._text[max(end - MAX_SPACE, self._mark) : end]
        return end - (len(tail) - len(tail.rstrip()))

    def _after_space(self, start: int) -> Steps[int]:
        """Return the index of the first character from `start` that is not white space; at the end, the length."""
        while True:
            space = SPACE.match(self._text, start)
            assert space is not None
            start = space.end()
            if start < len(self._text) or self._has_ended:
                return start
            yield

    def _more(self) -> Steps[None]:
        if self._has_ended:
            self._position = len(self._text)
            raise MalformedCallError
        yield


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """Return the value of each key of a JSON object, and the text of the value.

    text: begins with a brace. Raises MalformedCallError, also if a key occurs twice or has escapes.
    """
    members: dict[str, tuple[Any, str]] = {}
    position = 0
    while not END_OF_MEMBERS.fullmatch(text, position):
        member = MEMBER.match(text, position)
        if member is None or member[1] in members:
            raise MalformedCallError
        value, position = _value(text, member.end())
        members[member[1]] = value, text[member.end() : position]
    return members


def _value(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, and the index after it. Raises MalformedCallError."""
    try:
        return DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        raise MalformedCallError from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


DECODER = json.JSONDecoder(parse_int=float, parse_constant=_refuse)
"""Integers of any length are valid; Python refuses to convert long ones."""
