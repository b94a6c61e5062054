"""Read tool calls from an output while it arrives.

A format reads an output with a generator that yields wherever it needs more text, so that its code can be that of a
parser of the whole text. The result is a list of events, which does not depend on how the text was divided.

No text is lost: text that turns out not to be a call becomes content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields while it needs more text, then returns a value."""

SPACE = r"\s{0,16}"
HEAD = re.compile(
    rf'\{{{SPACE}"name"{SPACE}:{SPACE}"([^"\\]{{0,64}})"{SPACE},{SPACE}"(?:arguments|parameters)"{SPACE}:{SPACE}(?=\{{)'
)
"""Matches a call up to its arguments, if its name precedes them.

Its length is limited because it is matched again whenever text arrives.
"""
ARGUMENTS_FIRST = re.compile(rf'\{{{SPACE}"(?:arguments|parameters)"{SPACE}:{SPACE}(?=\{{)')
"""Matches a call up to its arguments, if they precede its name."""


@dataclass(frozen=True)
class Content:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call whose arguments follow."""

    index: int
    """Number of calls that began before it."""
    name: str


@dataclass(frozen=True)
class Arguments:
    """The next part of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallWithdrawn:
    """A call that has begun is malformed; its whole text follows as content."""

    index: int


Event = Content | CallBegun | Arguments | CallWithdrawn


class MalformedCallError(Exception):
    """Raised where the text does not continue as a call."""


class Reader:
    """The text of an output, and the events that were read from it.

    Formats use its methods that return `Steps`. White space around calls belongs to no event.
    """

    def __init__(self, names: Collection[str], max_calls: int | None = None) -> None:
        """names: names of the tools. Other calls are malformed, and so are calls after the first `max_calls`."""
        self.events: list[Event] = []
        self.has_ended = False
        """Whether no more text follows."""
        self._names = names
        self._max_calls = max_calls
        self._text = ""
        self._position = 0
        """Index of the character to read next."""
        self._mark = 0
        """Index of the first character that belongs to no event and to no complete call."""
        self._begun = 0
        """Number of calls that have begun."""
        self._completed = 0
        self._is_within_call = False
        self._follows_call = False

    def add(self, text: str) -> None:
        """Append text to the output."""
        self._text += text

    def content_until(self, marker: str | None) -> Steps[bool]:
        """Pass text on as content up to a marker, and read the marker. Return False at the end of the output.

        marker: None to pass on the whole rest.
        """
        if self._follows_call:
            self._mark = yield from self._after_space(self._mark)
        while True:
            self._text = self._text[self._mark :]
            self._mark = 0
            if marker is not None and (found := self._text.find(marker)) >= 0:
                self._pass_on(len(self._text[:found].rstrip()))
                self._position = found + len(marker)
                return True
            if self.has_ended:
                self._pass_on(len(self._text))
                return False
            self._pass_on(self._certain_content(marker))
            yield

    def attempt(self, steps: Steps[None]) -> Steps[None]:
        """Read calls. If one is malformed, pass on its text as content, up to where it was read."""
        try:
            yield from steps
        except MalformedCallError:
            if self._is_within_call:
                self._is_within_call = False
                self.events.append(CallWithdrawn(self._begun - 1))
            self._pass_on(self._position)

    def sees(self, literal: str) -> Steps[bool]:
        """Read white space; return whether `literal` follows."""
        self._position = yield from self._after_space(self._position)
        while not self._text.startswith(literal, self._position):
            if self.has_ended or not literal.startswith(self._text[self._position :]):
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
        """Read literals after a complete call. A model may leave them out."""
        for literal in literals:
            yield from self.next_is(literal)
        self._mark = self._position

    def text_until(self, marker: str) -> Steps[str]:
        """Read and return the text before a marker, and the marker. Raises MalformedCallError."""
        while (found := self._text.find(marker, self._position)) < 0:
            yield from self._more()
        text, self._position = self._text[self._position : found], found + len(marker)
        return text

    def call(self) -> Steps[None]:
        """Read a call that is one JSON object with `name`, and `arguments` or `parameters`. Raises MalformedCallError.

        Arguments that precede the name are passed on when the call is complete.
        """
        start = yield from self._start_of_object()
        scanner = ObjectScanner(start)
        while (head := HEAD.match(self._text, start)) is None and not scanner.has_ended(self._text):
            yield from self._more()
        if head is not None:
            name, self._position = head[1], head.end()
            self._begin(name)
            arguments = yield from self._arguments()
        while not scanner.has_ended(self._text):
            yield from self._more()
        self._position = scanner.position
        call = _parsed(self._text[start : self._position])
        if head is None:
            head = ARGUMENTS_FIRST.match(self._text, start)
            if head is None:
                raise MalformedCallError
            name, self._position = call.get("name"), head.end()
            self._begin(name)
            arguments = yield from self._arguments()
            self._position = scanner.position
        if (name, arguments) != (call["name"], call.get("arguments", call.get("parameters"))):
            raise MalformedCallError  # A key occurs twice.
        self._complete()

    def arguments_of(self, name: str) -> Steps[None]:
        """Read the arguments of a call whose name was read. Raises MalformedCallError."""
        yield from self._start_of_object()
        self._begin(name)
        yield from self._arguments()
        self._complete()

    def _begin(self, name: object) -> None:
        if not isinstance(name, str) or name not in self._names or self._completed == self._max_calls:
            raise MalformedCallError
        self.events.append(CallBegun(self._begun, name))
        self._begun += 1
        self._is_within_call = True

    def _arguments(self) -> Steps[dict[str, Any]]:
        """Pass on a JSON object as arguments, and return it. Raises MalformedCallError."""
        start = self._position
        scanner = ObjectScanner(start)
        while True:
            has_ended = scanner.has_ended(self._text)
            if scanner.position > self._position:
                self.events.append(Arguments(self._begun - 1, self._text[self._position : scanner.position]))
                self._position = scanner.position
            if has_ended:
                return _parsed(self._text[start : self._position])
            yield from self._more()

    def _complete(self) -> None:
        self._is_within_call = False
        self._follows_call = True
        self._completed += 1
        self._mark = self._position

    def _pass_on(self, end: int) -> None:
        if end > self._mark:
            self.events.append(Content(self._text[self._mark : end]))
            self._follows_call = False
        self._mark = self._position = end

    def _certain_content(self, marker: str | None) -> int:
        """Return the length of the text that cannot belong to a marker or to white space before one."""
        if marker is None:
            return len(self._text)
        size = next(size for size in range(len(marker) - 1, -1, -1) if self._text.endswith(marker[:size]))
        return len(self._text[: len(self._text) - size].rstrip())

    def _after_space(self, start: int) -> Steps[int]:
        """Return the index of the first character from `start` that is not white space; at the end, the length."""
        while True:
            rest = self._text[start:].lstrip()
            if rest or self.has_ended:
                return len(self._text) - len(rest)
            yield

    def _start_of_object(self) -> Steps[int]:
        """Read white space; return the index of the brace that follows. Raises MalformedCallError."""
        if not (yield from self.sees("{")):
            raise MalformedCallError
        return self._position

    def _more(self) -> Steps[None]:
        if self.has_ended:
            self._position = len(self._text)
            raise MalformedCallError
        yield


class ObjectScanner:
    """Finds the end of a JSON object in a text that grows. Does not check the syntax."""

    def __init__(self, start: int) -> None:
        """start: index of the opening brace."""
        self.position = start
        """Index after the last character that was scanned."""
        self._depth = 0
        self._has_ended = False
        self._is_in_string = False
        self._is_escaped = False

    def has_ended(self, text: str) -> bool:
        """Scan the rest of the text up to the end of the object; return whether it was found."""
        while not self._has_ended and self.position < len(text):
            self._scan(text[self.position])
            self.position += 1
            self._has_ended = self._depth == 0
        return self._has_ended

    def _scan(self, character: str) -> None:
        if self._is_in_string:
            self._is_in_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1


def _parsed(text: str) -> dict[str, Any]:
    """Return a JSON object. Raises MalformedCallError."""
    try:
        # Integers of any length are valid; Python refuses to convert long ones.
        parsed = json.loads(text, parse_int=float, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise MalformedCallError from None
    if not isinstance(parsed, dict):
        raise MalformedCallError
    return parsed


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
