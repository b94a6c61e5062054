"""Hugging Face transformers' `generate` for comparison, one request at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.support.memory import forget_peak, peak_bytes
from benchmarks.support.requests import Item
from benchmarks.support.serving import Clock, Run
from engine.models.decoder import Decoder
from engine.models.families import config_to_hf
from engine.models.loader import checkpoint_views
from engine.scheduling.request import Request

PEERS = ("transformers", "transformers-pld")
"""Names in comparisons: without drafts, and with prompt lookup."""
LOOKUP_TOKENS = 10
"""Draft tokens of prompt lookup; the value in transformers' documentation."""
CACHES = (None, "static")
"""Kinds of KV cache; None: transformers' default, a growing cache."""
PROBE_TOKENS = 32
PROBES = 3


def is_installed() -> bool:
    """Return whether transformers is installed."""
    return find_spec("transformers") is not None


def same_model(folder: Path | None, decoder: Decoder, dtype: torch.dtype) -> Any:
    """Return transformers' model of a folder; without a folder, a model that shares the weights of unpacked `decoder`.

    It is on the decoder's device.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    if folder is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(decoder.embedding.weight.device)
    else:
        fields = config_to_hf(decoder.config, str(dtype).removeprefix("torch."))
        config = AutoConfig.for_model(**{name: value for name, value in fields.items() if name != "rope_theta"})
        with torch.device(decoder.embedding.weight.device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        # Assign instead of copying, because the weights can fill more than half of a GPU's memory.
        missing, unexpected = model.load_state_dict(checkpoint_views(decoder), strict=False, assign=True)
        assert not [*unexpected, *(name for name in missing if name != "lm_head.weight")]
        model.tie_weights()
    # The folder's recommendations would override the settings of `_generate`.
    model.generation_config = GenerationConfig()
    return model.eval()


class TransformersPeer:
    """`generate`, plain or with prompt lookup."""

    def __init__(self, model: Any, *, lookup: bool, eos_token_ids: Sequence[int]) -> None:
        self._model = model
        self._lookup = lookup
        self._eos = list(eos_token_ids)
        self.cache: str | None = None

    def find_best_cache(self, item: Item) -> None:
        """Measure all kinds of cache and select the fastest. Prompt lookup only supports the default."""
        if self._lookup:
            return
        seconds: dict[str | None, float] = {}
        for _ in range(PROBES):
            for self.cache in CACHES:
                clock = Clock(perf_counter())
                self._generate(item, clock, PROBE_TOKENS)
                seconds[self.cache] = min(seconds.get(self.cache, np.inf), clock.last - clock.began)
        self.cache = min(seconds, key=lambda cache: seconds[cache])

    def run(self, items: Sequence[Item], advance: Callable[[], None]) -> Run:
        """Run all requests; call `advance` after each."""
        gc.collect()
        forget_peak()
        clocks, outputs = [], []
        began = perf_counter()
        for item in items:
            clocks.append(Clock(perf_counter()))
            outputs.append(self._generate(item, clocks[-1], item.request.sampling.max_tokens))
            advance()
        return Run(perf_counter() - began, outputs, clocks, peak_bytes())

    @torch.inference_mode()
    def _generate(self, item: Item, clock: Clock, max_tokens: int) -> np.ndarray:
        """Return the output, uint32 [n]."""
        from transformers import GenerationConfig, LogitsProcessorList

        sampling = item.request.sampling
        torch.manual_seed(sampling.seed)
        settings: dict[str, Any] = {"temperature": sampling.temperature, "top_k": 0} if sampling.is_sampled else {}
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=sampling.is_sampled,
            eos_token_id=None if sampling.ignore_eos else self._eos,
            pad_token_id=0,
            cache_implementation=self.cache,
            prompt_lookup_num_tokens=LOOKUP_TOKENS if self._lookup else None,
            # With a static cache on a GPU, compilation takes more than a minute.
            disable_compile=True,
            **settings,
        )
        prompt = torch.from_numpy(item.request.prompt.astype(np.int64))[None].to(self._model.device)
        text = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=config,
            logits_processor=LogitsProcessorList([] if item.request.recorded is None else [_Replay(item.request)]),
            streamer=_Arrivals(clock),
        )
        return text[0, prompt.shape[1] :].cpu().numpy().astype(np.uint32)


class _Replay:
    """Logits processor that allows only the recorded token; also called for each draft token that is verified."""

    def __init__(self, request: Request) -> None:
        assert request.recorded is not None
        self._tokens = request.recorded
        self._prompt_length = len(request.prompt)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = min(input_ids.shape[1] - self._prompt_length, len(self._tokens) - 1)
        forced = torch.full_like(scores, float("-inf"))
        forced[:, int(self._tokens[position])] = 0.0
        return forced


class _Arrivals:
    """Streamer that records when tokens arrive; the first tokens it gets are the prompt."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_prompt = True

    def put(self, tokens: Tensor) -> None:
        if not self._is_prompt and tokens.numel():
            self._clock.record(tokens.numel())
        self._is_prompt = False

    def end(self) -> None:
        """Nothing to do."""
