"""Drafts for `generate` of Hugging Face transformers, one sequence at a time.

    ssd = SsdGenerate(model)
    model.generate(**inputs, custom_generate=ssd)
    with ssd.enabled():  # for code that calls `generate` itself
        model.generate(**inputs)

The host verifies drafts in its assisted decoding, whose methods have private names (`PRIVATE_NAMES`), so only versions
that were tested are used (`TESTED`). Whatever assisted decoding does not support is decoded by the host as without this
module, and one line in the host's log gives the reason. Neither transformers nor torch is imported: both belong to the
caller.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import TracebackType
from typing import Any

from drafter_service.plugins.log import HostLog
from drafter_service.plugins.options import End, HostLimits, RequestOptions
from drafter_service.plugins.session import DraftCounters, HostSession
from drafter_service.plugins.settings import host_settings
from drafter_service.plugins.step_clock import StepClock

LOG = HostLog("transformers")

TESTED = ("5.23", "5.24")
"""Versions of transformers, without the last number."""

PRIVATE_NAMES = ("_assisted_decoding", "_beam_search", "_get_candidate_generator", "_sample")
"""Private methods of `GenerationMixin` that this module calls or replaces."""

DECODERS = {
    "greedy_search": "_sample",
    "sample": "_sample",
    "assisted_generation": "_sample",
    "beam_search": "_beam_search",
    "beam_sample": "_beam_search",
}
"""The host's decoding method by `GenerationMode`; assisted generation without drafts is one of the first two."""

EXACT_CRITERIA = ("EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria")
"""Stopping criteria at which assisted decoding stops where plain decoding stops. It checks others once per step, not
once per token, and would return more tokens than plain decoding."""

MAX_DRAFT = 16
DEADLINE_S = 0.01
"""Default of the maximum wait for drafts, in seconds: a fraction of a step."""


class SsdGenerate:
    """A value for `custom_generate=` of `generate`, with one connection for any number of calls. Threads may share it.

    Greedy outputs equal those of plain decoding, except that near ties may be resolved differently because matrix
    shapes differ. Sampled outputs follow the same distribution, but the host draws more random numbers with drafts.
    """

    def __init__(self, model: Any, *, max_draft: int = MAX_DRAFT, **settings: Any) -> None:
        """Prepare drafts of at most `max_draft` tokens; the connection is opened by the first call of `generate`.

        settings: see `PluginSettings`; by default those in the environment variable `SSD_PLUGIN`. Raises ValueError if
        max_draft is not positive, and UserError for settings that are not valid.
        """
        config = model.config.get_text_config()
        self._model = model
        limits = HostLimits(max_draft, config.vocab_size, getattr(config, "max_position_embeddings", None))
        name = model.config.name_or_path
        own = host_settings(settings, "transformers", name, config.vocab_size, LOG.warning, deadline_s=DEADLINE_S)
        self._session = HostSession(own, limits, LOG.warning)
        self._request_ids = itertools.count()
        self._reported: set[str] = set()
        self._unsupported = unsupported_version(type(model))

    @property
    def counters(self) -> DraftCounters:
        """Totals of all calls so far."""
        return self._session.counters

    def __call__(
        self,
        model: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        *,
        cache_salt: str = "",
        ssd_private: bool = False,
        ssd_session: str = "",
        ssd_max_draft: int | None = None,
        hints: Sequence[int] = (),
        **model_kwargs: Any,
    ) -> Any:
        """Decode with drafts. `generate` calls this, and passes on the options that its caller gave.

        cache_salt, ssd_private, ssd_session, ssd_max_draft, hints: see `RequestOptions`. Returns the same as the host's
        decoding methods.
        """
        arguments = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "generation_config": generation_config,
            **model_kwargs,
        }
        if (streamer := streamer_of_caller()) is not None:
            arguments["streamer"] = streamer
        reason = self._unsupported or reason_against(model, input_ids, stopping_criteria, generation_config, arguments)
        if reason:
            self._report_once(reason)
            decoder = decoder_of(generation_config)
            if streamer is not None and decoder != "_sample":
                raise ValueError("`streamer` cannot be used with beam search")
            return getattr(model, decoder)(input_ids, **arguments)
        options = RequestOptions(
            max_tokens=generation_config.max_length - input_ids.shape[1],
            salt=cache_salt,
            session=ssd_session,
            private=ssd_private,
            max_draft=ssd_max_draft,
            hints=tuple(hints),
        )
        return self._decode(model, input_ids, options, arguments)

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Within the block, `generate` of the model uses drafts. Calls with stop strings or an assistant do not."""
        model, generate = self._model, self._model.generate

        def generate_with_drafts(*args: Any, **kwargs: Any) -> Any:
            config = kwargs.get("generation_config") or model.generation_config
            # A stop string needs the tokenizer, which `generate` does not pass on to a `custom_generate`.
            own = ("custom_generate", "assistant_model", "stop_strings")
            if any(kwargs.get(name) is not None for name in own) or config.stop_strings is not None:
                return generate(*args, **kwargs)
            return generate(*args, **kwargs, custom_generate=self)

        before = vars(model).get("generate")
        model.generate = generate_with_drafts
        try:
            yield
        finally:
            if before is None:
                del model.generate
            else:
                model.generate = before

    def close(self) -> None:
        """Close the connection, or the embedded drafter."""
        self._session.close()

    def __enter__(self) -> SsdGenerate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _decode(self, model: Any, input_ids: Any, options: RequestOptions, arguments: dict[str, Any]) -> Any:
        """Run the host's assisted decoding, as one request of the session."""
        request_id, prompt = next(self._request_ids), input_ids[0].tolist()
        candidates = Candidates(self._session, request_id, prompt)
        self._session.start(request_id, prompt, options)
        try:
            result = type(model)._assisted_decoding(WithCandidates(model, candidates), input_ids, **arguments)
            text = getattr(result, "sequences", result)[0].tolist()
        except BaseException:
            self._session.finish(request_id, end=End.CANCELLED)
            raise
        self._session.finish(request_id, text)
        return result

    def _report_once(self, reason: str) -> None:
        if reason not in self._reported:
            self._reported.add(reason)
            LOG.warning(f"{reason}; decoding without drafts")


class Candidates:
    """The drafts of one call of `generate`; has the interface of the host's `CandidateGenerator`."""

    requires_model_outputs = False

    def __init__(self, session: HostSession, request_id: int, prompt: list[int]) -> None:
        self._session = session
        self._request_id = request_id
        self._text = prompt.copy()
        self._clock = StepClock(session)

    def get_candidates(self, input_ids: Any, **_: Any) -> tuple[Any, None]:
        """Return the text with a draft after it, int64 [1, N + K]; `input_ids`: int64 [1, N], the text."""
        self._clock.end()
        is_first = input_ids.shape[1] == len(self._text)
        self._text += input_ids[0, len(self._text) :].tolist()
        draft = self._session.draft([(self._request_id, self._text)])[0]
        self._session.schedule(self._request_id, draft)
        # The first step also runs the prompt.
        self._clock.begin((len(self._text) if is_first else 1) + len(draft))
        if not draft:
            return input_ids, None
        size = len(self._text)
        candidates = input_ids.new_empty((1, size + len(draft)))
        candidates[:, :size] = input_ids
        candidates[0, size:] = input_ids.new_tensor(draft)
        return candidates, None

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> None:
        """Do nothing: the session compares the next text with the draft."""


class WithCandidates:
    """A model as its `_assisted_decoding` sees it, except that its candidates are given. The model does not change."""

    def __init__(self, model: Any, candidates: Candidates) -> None:
        self._model = model
        self._candidates = candidates

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _get_candidate_generator(self, **_: Any) -> Candidates:
        return self._candidates


def unsupported_version(model_class: type) -> str:
    """Return why the installed transformers cannot be used, or ""."""
    installed = version("transformers")
    if installed.rpartition(".")[0] not in TESTED:
        return f"transformers {installed} was not tested, only {', '.join(TESTED)}"
    missing = [name for name in PRIVATE_NAMES if not hasattr(model_class, name)]
    return f"{model_class.__name__} has no {', '.join(missing)}" if missing else ""


def reason_against(
    model: Any, input_ids: Any, stopping_criteria: Sequence[Any], config: Any, arguments: dict[str, Any]
) -> str:
    """Return why a call cannot be decoded with drafts, so that its output would be that of plain decoding, or ""."""
    # Its name until version 5.23.
    cache: Any = arguments.get("cache", arguments.get("past_key_values"))
    others = [type(each).__name__ for each in stopping_criteria if type(each).__name__ not in EXACT_CRITERIA]
    reasons: dict[str, Callable[[], bool]] = {
        "beam search and the like are not supported": lambda: decoder_of(config) != "_sample",
        "only one sequence at a time is supported": lambda: input_ids.shape[0] != 1,
        "prompts without token ids are not supported": lambda: input_ids.shape[1] == 0,
        "encoder-decoder models are not supported": lambda: model.config.is_encoder_decoder,
        "the model cannot take tokens back": lambda: model._is_stateful,
        "a KV cache is needed": lambda: cache is None or not arguments.get("use_cache"),
        "static KV caches are not supported": lambda: "Static" in type(cache).__name__,
        "a KV cache from an earlier call is not supported": lambda: cache.get_seq_length() > 0,
        f"the stopping criterion {', '.join(others)} is not supported": lambda: bool(others),
    }
    return next((reason for reason, applies in reasons.items() if applies()), "")


def decoder_of(config: Any) -> str:
    """Return the name of the host's own decoding method. Raises ValueError for a mode that has none."""
    mode = config.get_generation_mode().value
    if mode not in DECODERS:
        raise ValueError(f"{mode} is not supported with drafts; call generate without custom_generate=SsdGenerate(...)")
    return DECODERS[mode]


def streamer_of_caller() -> Any:
    """Return the `streamer` that was given to `generate`.

    `generate` does not pass it on to a `custom_generate`, but has put the prompt into it, and whoever reads from it
    waits for an end. So it is read from the frame that called `SsdGenerate.__call__`.
    """
    caller = sys._getframe(2)
    return caller.f_locals.get("streamer") if caller.f_code.co_name == "generate" else None
