"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from engine.api.errors import ApiError
from engine.api.logprobs import chat_logprobs
from engine.api.outputs import Delta
from engine.api.responses import ResponseFormat, respond
from engine.api.schemas import ChatRequest
from engine.api.service import Service, encode_in_background
from engine.api.tools.definitions import NamedTool
from engine.api.tools.formats import FORMATS, ToolFormat, ToolParser
from engine.api.tools.grammar import tool_grammar
from engine.api.tools.output import CallOutput
from engine.sampling.grammar import Grammar
from engine.scheduling.request import FinishReason, Request
from ssd.errors import UserError


async def chat(service: Service, body: ChatRequest, http: HttpRequest) -> dict[str, Any] | Response:
    """Answer a chat. Raises ApiError and UserError."""
    service.check_model(body.model)
    prompt = await _prompt(service, body)
    form = _tool_format(service) if body.offered_tools else None
    grammar = body.grammar if form is None else _grammar(service, body, form)
    given = body.max_completion_tokens or body.max_tokens
    param = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    max_tokens = service.output_limit(prompt, given, service.window.tokens, param)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    hints = await service.hints(body)
    requests = service.requests(body, prompt, max_tokens, hints, logprobs=logprobs, grammar=grammar)
    return await respond(service, body, requests, _ChatFormat(service, body, requests, form), http)


def _tool_format(service: Service) -> ToolFormat:
    """Return the format of the model's tool calls. Raises ApiError."""
    if not service.served.chat.takes_tools:
        raise ApiError(400, "tools: the chat template of this model does not use them", param="tools")
    if service.served.tool_format is None:
        flag = f"--tool-call-parser {'|'.join(FORMATS)}"
        raise ApiError(
            400, f"tools: the format of this model's calls is not known; start the server with {flag}", param="tools"
        )
    return service.served.tool_format


def _grammar(service: Service, body: ChatRequest, form: ToolFormat) -> Grammar | None:
    """Return the grammar of outputs in a chat with tools: calls, or either calls or the `response_format`.

    None if outputs are not constrained. Raises UserError.
    """
    own = body.grammar  # Before tools are read, so that an error of the schema names its field.
    answer = None if body.response_format is None else body.response_format.definition
    if not body.must_call and answer is None:
        return own
    named = body.tool_choice.name if isinstance(body.tool_choice, NamedTool) else None
    tools = [tool for tool in body.offered_tools if named in (None, tool.name)]
    token_ids = service.served.tokenizer.token_ids(form.markers)
    return tool_grammar(form, tools, token_ids, parallel=body.parallel_tool_calls and named is None, answer=answer)


async def _prompt(service: Service, body: ChatRequest) -> np.ndarray:
    """Return the token ids of the messages, uint32 [P]. Raises ApiError."""
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    tools = [tool.as_sent() for tool in body.offered_tools]
    variables, chat = body.template_variables, service.served.chat
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


class _ChatFormat(ResponseFormat):
    """Format of chat completions: complete responses and stream chunks."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self, service: Service, body: ChatRequest, requests: Sequence[Request], form: ToolFormat | None
    ) -> None:
        """form: format of the calls in the outputs; None for a chat without tools."""
        super().__init__(service, body, requests)
        names = {tool.name for tool in body.offered_tools}
        max_calls = None if body.parallel_tool_calls else 1
        self._calls = [] if form is None else [CallOutput(ToolParser(form, names, max_calls)) for _ in requests]
        """One per output."""

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
