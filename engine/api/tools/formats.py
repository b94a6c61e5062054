"""The formats in which models write tool calls, by the names that vLLM and SGLang give to their parsers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from engine.api.tools.reader import Event, Reader, Steps

PYTHON_TAG = "<|python_tag|>"
"""Llama 3.1 may write it before a call."""
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
NAME_END = "<｜tool▁sep｜>"
"""Tokens of DeepSeek models."""


class ToolFormat(ABC):
    """One format: how its calls are written and read.

    Calls are written as `opening`, for each call `before_arguments`, the arguments as JSON and `after_arguments`, with
    `separator` between calls, and `closing`.
    """

    name: str
    """Value of --tool-call-parser."""
    markers: tuple[str, ...] = ()
    """Texts that are single tokens in the vocabularies of these models."""
    opening = ""
    before_arguments: str
    """Text in which NAME stands for the name of the tool."""
    after_arguments: str
    separator: str
    closing = ""

    def read(self, reader: Reader) -> Steps[None]:
        """Read a whole output. By default, calls begin with the first marker."""
        while (yield from reader.content_until(self.markers[0])):
            yield from reader.attempt(self.read_calls(reader))

    @abstractmethod
    def read_calls(self, reader: Reader) -> Steps[None]:
        """Read calls after the first marker. Raises MalformedCallError."""

    @abstractmethod
    def is_named_in(self, template: str) -> bool:
        """Return whether a chat template, in Jinja, writes calls in this format."""


class Hermes(ToolFormat):
    """Format of Hermes 2 and 3, Qwen 2.5, Qwen 3, MiMo."""

    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")
    before_arguments = '<tool_call>\n{"name": "NAME", "arguments": '
    after_arguments = "}\n</tool_call>"
    separator = "\n"

    def read_calls(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat.read_calls`."""
        yield from reader.call()
        yield from reader.close("</tool_call>")

    def is_named_in(self, template: str) -> bool:
        """See `ToolFormat.is_named_in`. Other formats with this marker do not write arguments as JSON."""
        return "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template


class Llama3Json(ToolFormat):
    """Format of Llama 3.1, 3.2 and 3.3. Calls are read only from the start of an output.

    The models separate calls by semicolons or newlines.
    """

    name = "llama3_json"
    markers = (PYTHON_TAG,)
    before_arguments = '{"name": "NAME", "parameters": '
    after_arguments = "}"
    separator = "; "

    def read(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat.read`."""
        if (yield from reader.next_is(PYTHON_TAG)) or (yield from reader.sees("{")):
            yield from reader.attempt(self.read_calls(reader))
        yield from reader.content_until(None)

    def read_calls(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat.read_calls`."""
        yield from reader.call()
        while (yield from reader.next_is(";")) or (yield from reader.sees("{")):
            yield from reader.call()

    def is_named_in(self, template: str) -> bool:
        """See `ToolFormat.is_named_in`."""
        return "ipython" in template and '"parameters": ' in template


class Mistral(ToolFormat):
    """Format of Mistral 7B v0.3, Mixtral 8x22B, Mistral Nemo, Ministral 8B, Mistral Small 2409 and 2501."""

    name = "mistral"
    markers = ("[TOOL_CALLS]",)
    opening = "[TOOL_CALLS]["
    before_arguments = '{"name": "NAME", "arguments": '
    after_arguments = "}"
    separator = ", "
    closing = "]"

    def read_calls(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat.read_calls`."""
        yield from reader.expect("[")
        yield from reader.call()
        while (yield from reader.next_is(",")):
            yield from reader.call()
        yield from reader.close("]")

    def is_named_in(self, template: str) -> bool:
        """See `ToolFormat.is_named_in`. Later versions write names and arguments without a list."""
        return "[TOOL_CALLS]" in template and "[ARGS]" not in template


class DeepSeekV3(ToolFormat):
    """Format of DeepSeek-V3 and R1."""

    name = "deepseek_v3"
    markers = (CALLS_BEGIN, CALL_BEGIN, NAME_END, CALL_END, CALLS_END)
    opening = CALLS_BEGIN
    before_arguments = f"{CALL_BEGIN}function{NAME_END}NAME\n```json\n"
    after_arguments = f"\n```{CALL_END}"
    separator = "\n"
    closing = CALLS_END

    def read_calls(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat.read_calls`."""
        yield from reader.expect(CALL_BEGIN)
        while True:
            yield from reader.expect("function", NAME_END)
            name = yield from reader.name_until("\n")
            yield from reader.expect("```json")
            yield from reader.arguments_of(name)
            yield from reader.close("```", CALL_END, CALLS_END)
            if not (yield from reader.next_is(CALL_BEGIN)):
                return

    def is_named_in(self, template: str) -> bool:
        """See `ToolFormat.is_named_in`."""
        return CALLS_BEGIN in template and "```json" in template


class DeepSeekV31(ToolFormat):
    """Format of DeepSeek-V3.1."""

    name = "deepseek_v31"
    markers = DeepSeekV3.markers
    opening = CALLS_BEGIN
    before_arguments = f"{CALL_BEGIN}NAME{NAME_END}"
    after_arguments = CALL_END
    separator = ""
    closing = CALLS_END

    def read_calls(self, reader: Reader) -> Steps[None]:
        """See `ToolFormat.read_calls`."""
        yield from reader.expect(CALL_BEGIN)
        while True:
            name = yield from reader.name_until(NAME_END)
            yield from reader.arguments_of(name)
            yield from reader.close(CALL_END, CALLS_END)
            if not (yield from reader.next_is(CALL_BEGIN)):
                return

    def is_named_in(self, template: str) -> bool:
        """See `ToolFormat.is_named_in`."""
        return CALLS_BEGIN in template and "```json" not in template


FORMATS: dict[str, ToolFormat] = {
    known.name: known for known in (Hermes(), Llama3Json(), Mistral(), DeepSeekV3(), DeepSeekV31())
}
"""Formats by name."""


def recognize(template: str) -> ToolFormat | None:
    """Return the format in which a chat template, in Jinja, writes calls; None if no format or several match."""
    found = [known for known in FORMATS.values() if known.is_named_in(template)]
    return found[0] if len(found) == 1 else None


class ToolParser:
    """Reads the calls of one output."""

    def __init__(self, form: ToolFormat, names: Collection[str], max_calls: int | None = None) -> None:
        """names: names of the tools. Calls of other names are content, and so are calls after the first `max_calls`."""
        self._reader = Reader(names, max_calls)
        self._steps = form.read(self._reader)

    def feed(self, text: str) -> list[Event]:
        """Append text and return the events that are certain."""
        self._reader.add(text)
        next(self._steps)
        return self._taken()

    def finish(self) -> list[Event]:
        """Return the remaining events, after the end of the output."""
        self._reader.has_ended = True
        for _ in self._steps:
            raise AssertionError("a format waits for text after the end")
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._reader.events = self._reader.events, []
        return events
