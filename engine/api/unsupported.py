"""Fields of OpenAI's and vLLM's request bodies that this server does not have, and the values that it accepts for them.

A value that asks for what the server does anyway is accepted, since clients send defaults; any other is an error that
says why. Fields that are neither here nor in `engine.api.schemas` are errors, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Unsupported(NamedTuple):
    """A field that the server does not have."""

    reason: str
    """Why other values are refused, or what to send instead."""
    accepted: tuple[Any, ...] = ()
    """Values that are accepted, because they change nothing."""


_ONLY_TEXT = "this server reads and writes text only"
_NO_BEAMS = "there is no beam search; sample several outputs with n"
_OLDER_NAME = "this is an older name; send response_format or structured_outputs"
_NO_TRANSFER = "this server does not exchange KV caches with others"
_ONLY_RENDERED = "there is no endpoint that only renders prompts"

UNSUPPORTED: Mapping[str, Unsupported] = {
    # Fields of OpenAI's API.
    "audio": Unsupported(_ONLY_TEXT),
    "modalities": Unsupported(_ONLY_TEXT, (["text"],)),
    "functions": Unsupported("this is an older name; send tools", ([],)),
    "function_call": Unsupported("this is an older name; send tool_choice", ("none",)),
    "prompt_cache_options": Unsupported("shared prefixes are always cached; cache_salt separates them", ({},)),
    "prompt_cache_retention": Unsupported("cached prefixes are kept until their memory is needed", ("in_memory",)),
    "moderation": Unsupported("this server does not moderate"),
    "verbosity": Unsupported("this server has no such setting; ask for it in a message", ("medium",)),
    "web_search_options": Unsupported("this server does not search the web"),
    "suffix": Unsupported("this server does not insert text before a suffix", ("",)),
    # Fields of vLLM's API.
    "use_beam_search": Unsupported(_NO_BEAMS, (False,)),
    "length_penalty": Unsupported(_NO_BEAMS, (1,)),
    "early_stopping": Unsupported(_NO_BEAMS, (False,)),
    "include_stop_str_in_output": Unsupported("texts end before the stop string, which is the stop_reason", (False,)),
    "skip_special_tokens": Unsupported("texts have no special tokens; return_token_ids returns their ids", (True,)),
    "spaces_between_special_tokens": Unsupported("texts have no special tokens", (True, False)),
    "truncate_prompt_tokens": Unsupported("prompts are not cut; send a shorter one"),
    "truncation_side": Unsupported("prompts are not cut", ("left", "right")),
    "prompt_logprobs": Unsupported("send echo with logprobs to /v1/completions"),
    "allowed_token_ids": Unsupported("constrain outputs with logit_bias or structured_outputs"),
    "bad_words": Unsupported("forbid tokens with logit_bias", ([],)),
    "logits_processors": Unsupported("requests cannot run code on this server", ([],)),
    "prompt_embeds": Unsupported("send text or token ids as the prompt"),
    "detokenize": Unsupported("outputs are always text; return_token_ids adds the ids", (True,)),
    "priority": Unsupported("requests run in the order of their arrival", (0,)),
    "request_id": Unsupported("send it as the header X-Request-Id, which the response repeats"),
    "include_reasoning": Unsupported("reasoning is a part of the content", (True,)),
    "thinking_token_budget": Unsupported("this server does not limit reasoning; send max_completion_tokens", (-1,)),
    "repetition_detection": Unsupported("this server does not detect repetitions; send repetition_penalty"),
    "chat_template": Unsupported("the template of the model's folder is used; send chat_template_kwargs to change it"),
    "media_io_kwargs": Unsupported(_ONLY_TEXT, ({},)),
    "mm_processor_kwargs": Unsupported(_ONLY_TEXT, ({},)),
    "return_token_offsets": Unsupported("logprobs of completions have text_offset", (False,)),
    "return_prompt_text": Unsupported("return_token_ids returns the ids of the prompt", (False,)),
    "return_assistant_tokens_mask": Unsupported(_ONLY_RENDERED, (False,)),
    "kv_transfer_params": Unsupported(_NO_TRANSFER),
    "ec_transfer_params": Unsupported(_NO_TRANSFER),
    "vllm_xargs": Unsupported("this server has no such extensions", ({},)),
    "guided_json": Unsupported(_OLDER_NAME),
    "guided_regex": Unsupported(_OLDER_NAME),
    "guided_choice": Unsupported(_OLDER_NAME),
    "guided_grammar": Unsupported(_OLDER_NAME),
    "guided_decoding_backend": Unsupported(_OLDER_NAME),
    "guided_whitespace_pattern": Unsupported(_OLDER_NAME),
}

_SEND_FORMAT = "send response_format of the type json_schema or json_object"
_NO_GRAMMARS = "this server takes no such grammars; send regex, choice, or response_format with a JSON schema"

UNSUPPORTED_PARTS: Mapping[str, str] = {
    "structured_outputs.json": _SEND_FORMAT,
    "structured_outputs.json_object": _SEND_FORMAT,
    "structured_outputs.grammar": _NO_GRAMMARS,
    "structured_outputs.structural_tag": _NO_GRAMMARS,
}
"""Why parts of vLLM's fields are refused, or what to send instead, by the path of the part."""


def without_unsupported(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body without those of `UNSUPPORTED`. Raises ValueError for a value that is refused."""
    for name in UNSUPPORTED.keys() & given.keys():
        value, known = given[name], UNSUPPORTED[name]
        if value is not None and value not in known.accepted:
            raise ValueError(f"{name}: {known.reason}")
    return {name: value for name, value in given.items() if name not in UNSUPPORTED}
