"""Learn finished texts. Those that come with their prompts are scored first, in shadow mode."""

from __future__ import annotations

import asyncio

import numpy as np

from drafter_service.server.namespace import Namespace
from drafter_service.server.requests import read_texts
from drafter_service.server.session import NO_TOKENS
from drafter_service.server.shadow import ShadowDrafter
from drafter_service.stubs import drafter_pb2 as pb
from ssd.types import Progress

TEXTS_PER_TURN = 256
"""Number of texts learned before other tasks of the event loop run."""
SCORED_PER_TURN = 32
"""Number of output tokens scored before other tasks of the event loop run: about 0.5 ms."""


async def learn(namespace: Namespace, message: pb.Texts, total: pb.ObserveResponse) -> None:
    """Learn finished texts at the rate of the index, and add their counts to `total`.

    Raises WireError, with no effect, for an invalid message, and ClosedError.
    """
    texts = read_texts(message, namespace.model.vocab_size)
    kept = namespace.config.learned_prompt_tokens
    for index, name in enumerate(texts.request_ids):
        if index % TEXTS_PER_TURN == 0:
            await asyncio.sleep(0)
        await namespace.wait_for_room()
        text = texts.text(index)
        if texts.prompt_lengths is not None and not namespace.has_learned(name):
            prompt_length = texts.prompt_lengths[index]
            namespace.shadow.observed += 1
            if prompt_length < len(text) and namespace.shadow_budget.is_left():
                await _score(namespace, text[:prompt_length], text[prompt_length:])
            if prompt_length > kept:
                text = text[prompt_length - kept :]
        if namespace.learn(text, name, texts.tags[index], finished_at=texts.times[index]):
            total.tokens += len(text)
            total.texts += 1
        else:
            total.duplicates += 1


async def _score(namespace: Namespace, prompt: np.ndarray, output: np.ndarray) -> None:
    """Replay a finished request; its output, uint32 [n], is used as the tokens of the target.

    prompt: uint32 [P]. Raises ClosedError.
    """
    budget, drafter = namespace.shadow_budget, namespace.new_drafter(stats=namespace.shadow.stats)
    shadow, limit = ShadowDrafter(drafter), namespace.config.max_draft
    try:
        with budget.spend():
            shadow.begin(0, prompt, learn=False)
            if drafter.is_sorting:
                await asyncio.to_thread(drafter.wait_for_sorting)
                namespace.check_is_open()
            shadow.advance(Progress.of_one(0, NO_TOKENS, max_draft=limit))
        for first in range(0, len(output), SCORED_PER_TURN):
            with budget.spend():
                shadow.advance(Progress.of_one(0, output[first : first + SCORED_PER_TURN], max_draft=limit))
            await asyncio.sleep(0)
            namespace.check_is_open()
        shadow.finish(0, NO_TOKENS, learn=False)
        namespace.shadow.scored += 1
    finally:
        namespace.release(drafter)
