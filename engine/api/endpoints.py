"""The endpoints that run the model, `/v1/completions` and `/v1/chat/completions`.

Both share one path: the body gives prompts, limits and sampling parameters, which give requests; their outputs become a
complete JSON document, or a stream of server-sent events.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import numpy as np
import orjson
from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse

from engine.api.errors import ApiError, engine_errors, error_body
from engine.api.fields import Tool
from engine.api.metrics import RequestRecorder
from engine.api.outputs import Delta, OutputText, Piece, delta_of
from engine.api.responses import ResponseFormat, TextOffsets, chat_logprobs, completion_logprobs, prompt_offsets
from engine.api.schemas import ChatRequest, CompletionRequest, SamplingFields
from engine.api.service import DEFAULT_MAX_TOKENS, Service, encode_in_background
from engine.api.tool_formats import FORMATS, CallOutput, ToolFormat, tool_grammar
from engine.models.tokenizer import Detokenizer
from engine.sampling.grammar import Grammar
from engine.sampling.logprobs import Logprobs
from engine.scheduling.request import Completion, FinishReason, Request
from ssd.errors import UserError

T = TypeVar("T")


class ClientGoneError(Exception):
    """Raised when the client has closed the connection."""


async def answer(service: Service, body: CompletionRequest | ChatRequest, http: HttpRequest) -> Response:
    """Run the requests of a body and return the response, streamed if the body says so.

    Raises ApiError, and ClientGoneError if the client disconnects, which cancels the running requests.
    """
    with engine_errors(body.prompt_field):
        service.check_model(body.model)
        form: ResponseFormat[Any]
        form = ChatFormat(service, body) if isinstance(body, ChatRequest) else CompletionFormat(service, body)
        form.requests = await form.make_requests()
        if body.stream:
            return await _streamed(_deltas(service, body, form.requests), form, http)
        document = form.document(await _while_connected(_outputs(service, body, form.requests), http))
        # FastAPI would take a hundred times as long to write log-probabilities.
        return Response(orjson.dumps(document), media_type="application/json")


class CompletionFormat(ResponseFormat[CompletionRequest]):
    """Format of text completions: complete responses and stream chunks."""

    id_prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        super().__init__(service, body)
        self._tokenizer = service.served.tokenizer
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)
        """Offsets of the tokens of each output so far; the text sent so far may be shorter."""

    async def make_requests(self) -> list[Request]:
        """See `ResponseFormat.make_requests`."""
        body, service = self._body, self._service
        encode = partial(self._tokenizer.encode, add_special_tokens=body.add_special_tokens)
        prompt_logprobs = body.logprobs if body.echo else None
        if body.max_tokens == 0:
            prompt_logprobs = prompt_logprobs or 0  # The engine runs a prompt without an output to score it.
        hints, requests = await service.hints(body), []
        characters = sum(len(given) for given in body.prompts if isinstance(given, str))
        for given in body.prompts:
            is_text = isinstance(given, str)
            tokens = await encode_in_background(partial(encode, given), characters) if is_text else given
            prompt = np.array(tokens, np.uint32)
            limit = service.output_limit(prompt, body.max_tokens, DEFAULT_MAX_TOKENS, "max_tokens")
            requests += service.requests(
                body, prompt, limit, hints, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs
            )
        return requests

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return chunks with the prompts, if their texts or ids were requested."""
        if not (self._body.echo or self.prompt_fields(0)):
            return []
        given = [{"text": self._echo(index)} | self.prompt_fields(index) for index in range(len(self.requests))]
        return [self.chunk([self.choice(index, fields, None)]) for index, fields in enumerate(given)]

    def choice_of(self, delta: Delta, *, is_chunk: bool) -> dict[str, Any]:
        """See `ResponseFormat.choice_of`."""
        echo = "" if is_chunk else self._echo(delta.index)
        choice = self.choice(delta.index, {"text": echo + delta.text}, delta.completion) | self.token_fields(delta)
        if not is_chunk:
            choice |= self.prompt_fields(delta.index)
        if delta.logprobs is not None:
            choice["logprobs"] = self._scores(delta, delta.logprobs, echo)
        return choice

    def _echo(self, index: int) -> str:
        """Return the text of the prompt of an output, as it was sent or with the special tokens among its ids.

        Empty unless it was requested.
        """
        if not self._body.echo:
            return ""
        given = self._body.prompts[self.prompt_index(index)]
        prompt = self.requests[index].prompt
        return given if isinstance(given, str) else self._tokenizer.decode(prompt, skip_special_tokens=False)

    def _scores(self, delta: Delta, logprobs: Logprobs, echo: str) -> dict[str, Any]:
        if self._body.echo:  # Not streamed, so that this is called once for an output.
            self._offsets[delta.index] = TextOffsets(len(echo))
        pieces = map(self.names.output_bytes, delta.tokens.tolist())
        values = completion_logprobs(delta.tokens, logprobs, self.names, self._offsets[delta.index].advance(pieces))
        if not self._body.echo:
            return values
        prompt, prompt_logprobs = self.requests[delta.index].prompt, self.completions[delta.index].prompt_logprobs
        assert prompt_logprobs is not None
        offsets = prompt_offsets(echo, list(map(self._tokenizer.token_bytes, prompt.tolist())))
        # The first token has no log-probability.
        rest = completion_logprobs(prompt[1:], prompt_logprobs, self.names, offsets[1:])
        first = {"tokens": self.names.name(int(prompt[0])), "text_offset": 0}
        joined: dict[str, Any] = {}
        for name, before in rest.items():
            own = values[name]
            joined[name] = None if before is None or own is None else [first.get(name), *before, *own]
        return joined


class ChatFormat(ResponseFormat[ChatRequest]):
    """Format of chat completions: complete responses and stream chunks."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest) -> None:
        super().__init__(service, body)
        self._calls: list[CallOutput] = []
        """One per output of a chat with tools."""

    async def make_requests(self) -> list[Request]:
        """See `ResponseFormat.make_requests`."""
        body, service = self._body, self._service
        prompt, hints = await self._prompt(), await service.hints(body)
        grammar = body.grammar  # Before tools are read, so that an error of the schema names its field.
        if body.offered_tools:
            form = tool_format(service)
            names = {tool.name for tool in body.offered_tools}
            max_calls = None if body.parallel_tool_calls else 1
            self._calls = [CallOutput(form, names, max_calls) for _ in range(body.n)]
            grammar = self._tool_grammar(form) or grammar
        given, field = body.max_completion_tokens, "max_completion_tokens"
        if given is None:
            given, field = body.max_tokens, "max_tokens"
        limit = service.output_limit(prompt, given, service.window.tokens, field)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return service.requests(body, prompt, limit, hints, logprobs=logprobs, grammar=grammar)

    async def _prompt(self) -> np.ndarray:
        body, chat = self._body, self._service.served.chat
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        tools = [tool.as_sent() for tool in body.offered_tools]
        variables = body.template_variables
        for name in chat.unused(variables, has_tools=bool(tools)):
            field = name if name in ChatRequest.model_fields else "chat_template_kwargs"
            raise ApiError(400, f"{field}: the model's chat template does not use {name!r}", param=field)
        can_begin = not body.continue_final_message
        render = partial(
            chat.tokens, messages, tools or None, variables, add_special_tokens=body.add_special_tokens,
            add_generation_prompt=can_begin if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )  # fmt: skip
        try:
            return await encode_in_background(render, sum(len(str(part)) for part in (*messages, *tools)))
        except UserError as problem:
            raise ApiError(400, str(problem), param="messages") from None

    def _tool_grammar(self, form: ToolFormat) -> Grammar | None:
        """Return the grammar of outputs that are calls, or either calls or the `response_format`.

        None if outputs need not be calls. Raises UserError.
        """
        body = self._body
        definition = None if body.response_format is None else body.response_format.definition
        if not body.must_call and definition is None:
            return None
        named = body.tool_choice.name if isinstance(body.tool_choice, Tool) else None
        tools = [tool for tool in body.offered_tools if named in (None, tool.name)]
        token_ids = self._service.served.tokenizer.token_ids(form.markers)
        parallel = body.parallel_tool_calls and named is None
        return tool_grammar(form, tools, token_ids, parallel=parallel, answer=definition)

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return one chunk per output with the assistant's role."""
        content = {"delta": {"role": "assistant", "content": ""}}
        outputs = range(len(self.requests))
        return [self.chunk([self.choice(index, content, None)]) | self.prompt_fields(index) for index in outputs]

    def document(self, outputs: Sequence[Delta]) -> dict[str, Any]:
        """See `ResponseFormat.document`."""
        return super().document(outputs) | self.prompt_fields(0)

    def choice_of(self, delta: Delta, *, is_chunk: bool) -> dict[str, Any]:
        """See `ResponseFormat.choice_of`."""
        content = self._delta(delta) if is_chunk else {"message": {"role": "assistant"} | self._message(delta)}
        choice = self.choice(delta.index, content, delta.completion) | self.token_fields(delta)
        if choice["finish_reason"] == FinishReason.STOP and self._calls and self._calls[delta.index].calls:
            choice["finish_reason"] = "tool_calls"
        if delta.logprobs is not None:
            choice["logprobs"] = chat_logprobs(delta.tokens, delta.logprobs, self.names)
        return choice

    def _delta(self, delta: Delta) -> dict[str, Any]:
        if self._calls:
            return {"delta": self._calls[delta.index].delta(delta.text, is_last=delta.completion is not None)}
        return {"delta": {"content": delta.text} if delta.text else {}}

    def _message(self, delta: Delta) -> dict[str, Any]:
        return self._calls[delta.index].message(delta.text) if self._calls else {"content": delta.text}


def tool_format(service: Service) -> ToolFormat:
    """Return the format of the model's tool calls. Raises ApiError."""
    if not service.served.chat.takes_tools:
        raise ApiError(400, "tools: the chat template of this model does not use them", param="tools")
    if service.served.tool_format is None:
        flag = f"--tool-call-parser {'|'.join(FORMATS)}"
        raise ApiError(
            400, f"tools: the format of this model's calls is not known; start the server with {flag}", param="tools"
        )
    return service.served.tool_format


async def _deltas(service: Service, body: SamplingFields, requests: Sequence[Request]) -> AsyncGenerator[Delta, None]:
    """Admit requests and yield their deltas. Raises ApiError."""
    recorder = RequestRecorder(service.metrics, requests)
    decode = service.served.tokenizer.decode

    try:
        service.admit(len(requests))
        with engine_errors(body.prompt_field):
            await service.check_grammar(requests[0].sampling.grammar, len(requests))
            service.admit(len(requests))  # Others may have come during the check.
            texts = [OutputText(Detokenizer(decode, each.prompt), each.sampling.stop) for each in requests]
            async with aclosing(service.engine.run(requests)) as events:
                async for index, event in events:
                    delta = delta_of(index, event, texts[index])
                    recorder.record(delta)
                    yield delta
    except (asyncio.CancelledError, GeneratorExit):
        recorder.record_abort()
        raise


async def _outputs(service: Service, body: SamplingFields, requests: Sequence[Request]) -> list[Delta]:
    """Return the outputs of all requests, each as one delta."""
    pieces: list[list[Piece]] = [[] for _ in requests]
    completions: dict[int, Completion] = {}
    async with aclosing(_deltas(service, body, requests)) as deltas:
        async for delta in deltas:
            pieces[delta.index] += delta.pieces
            if delta.completion is not None:
                completions[delta.index] = delta.completion
    return [
        Delta(index, pieces[index], completion.tokens, completion.logprobs, completion)
        for index, completion in sorted(completions.items())
    ]


async def _streamed(
    deltas: AsyncGenerator[Delta, None], form: ResponseFormat[Any], http: HttpRequest
) -> StreamingResponse:
    # Invalid requests fail before their first delta, while an error response can still be sent.
    first_delta = await _while_connected(anext(deltas), http)

    async def events() -> AsyncIterator[bytes]:
        async with aclosing(deltas):
            try:
                for chunk in (*form.first_chunks(), *form.chunks(first_delta)):
                    yield _server_sent(chunk)
                async for delta in deltas:
                    for chunk in form.chunks(delta):
                        yield _server_sent(chunk)
                for chunk in form.last_chunks():
                    yield _server_sent(chunk)
            except ApiError as error:
                yield _server_sent(error_body(error))
            yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _while_connected(work: Awaitable[T], http: HttpRequest) -> T:
    """Await `work`; cancel it and raise ClientGoneError if the client disconnects first."""
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, disconnecting):
            task.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _server_sent(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
