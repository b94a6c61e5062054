"""The value of `custom_generate=`, which decides how a call is decoded."""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from drafter_service.plugins.options import End, HostLimits, RequestOptions
from drafter_service.plugins.session import DraftCounters, HostSession
from drafter_service.plugins.settings import HostLog, host_settings
from drafter_service.plugins.step_clock import StepClock
from drafter_service.plugins.transformers.batch import BatchDecoder
from drafter_service.plugins.transformers.support import (
    decoder_of,
    is_synced,
    reason_against,
    unsupported_version,
    with_limits_of,
)
from ssd.budget.padding import MAX_LENGTHS, Padding

LOG = HostLog("transformers")

MAX_DRAFT = 16
DEADLINE_S = 0.01
"""Default of the maximum wait for drafts, in seconds: a fraction of a step."""
REPLACING = threading.Lock()
"""Held while `generate` of a model is replaced."""


class SsdGenerate:
    """A value for `custom_generate=` of `generate`, with one connection for any number of calls. Threads may share it.

    Greedy outputs equal those of plain decoding, except that near ties may be resolved differently because matrix
    shapes differ. Sampled outputs follow the same distribution, but the host draws more random numbers with drafts.
    """

    def __init__(self, model: Any, *, max_draft: int = MAX_DRAFT, **settings: Any) -> None:
        """Connect for drafts of at most `max_draft` tokens. The first time, kernels are compiled for about a minute.

        settings: see `PluginSettings`; by default those in the environment variable `SSD_PLUGIN`. Raises ValueError if
        max_draft is not positive, and UserError for settings that are not valid.
        """
        config = model.config.get_text_config()
        self._model = model
        context_window = getattr(config, "max_position_embeddings", None)
        limits = HostLimits(max_draft, config.vocab_size, context_window, padding=padding_of(max_draft))
        name = model.config.name_or_path
        own = host_settings(settings, "transformers", name, config.vocab_size, LOG.warning, deadline_s=DEADLINE_S)
        self._session = HostSession(own, limits, LOG.warning, inform=LOG.info)
        self._request_ids = itertools.count()
        self._reported: set[str] = set()
        self._unsupported = unsupported_version(type(model))
        if not self._unsupported:
            self._session.open()

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
        cache_salt: str | None = None,
        ssd_private: bool = False,
        ssd_session: str = "",
        ssd_max_draft: int | None = None,
        hints: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decode with drafts. `generate` calls this, and passes on the options that its caller gave.

        cache_salt, ssd_private, ssd_session, ssd_max_draft, hints: see `RequestOptions`; hints are token ids, or texts
        as of other hosts. With a value of a wrong type, there are no drafts. Returns the same as the host's decoding
        methods.
        """
        arguments = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "generation_config": generation_config,
            "synced_gpus": is_synced(model),
            **model_kwargs,
            **arguments_of_caller(),
        }
        reason = self._unsupported or reason_against(model, input_ids, arguments)
        if reason:
            self._report_once(reason)
            decoder = decoder_of(generation_config)
            if "streamer" in arguments and decoder != "_sample":
                raise ValueError("`streamer` cannot be used with beam search")
            return getattr(model, decoder)(input_ids, **arguments)
        config = with_limits_of(stopping_criteria, generation_config, input_ids)
        arguments["generation_config"] = config
        options = RequestOptions(
            max_tokens=config.max_length - input_ids.shape[1], salt="" if cache_salt is None else cache_salt
        )
        hints = hints.tolist() if hasattr(hints, "tolist") else list(hints) if isinstance(hints, tuple) else hints
        extras = {"ssd_private": ssd_private, "ssd_session": ssd_session, "ssd_max_draft": ssd_max_draft}
        extras["hints"] = hints
        return self._decode(model, input_ids, options, extras, arguments)

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Within the block, `generate` of the model uses drafts. Calls with stop strings or an assistant do not.

        Blocks may overlap, also in several threads: all calls use the `SsdGenerate` whose block began last.
        """
        with REPLACING:
            if not isinstance(self._model.generate, GenerateInBlocks):
                self._model.generate = GenerateInBlocks(self._model)
            replaced = self._model.generate
            replaced.blocks.append(self)
        try:
            yield
        finally:
            with REPLACING:
                replaced.blocks.remove(self)
                replaced.restore()

    def close(self) -> None:
        """Close the connection, or the embedded drafter."""
        self._session.close()

    def __enter__(self) -> SsdGenerate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _decode(
        self, model: Any, input_ids: Any, options: RequestOptions, extras: dict[str, Any], arguments: dict[str, Any]
    ) -> Any:
        """Decode with drafts; options, extras: those of each row, see `HostSession.start`."""
        if len(input_ids) == 1:
            return decode_one(self._session, next(self._request_ids), options, extras, model, input_ids, arguments)
        decoder = BatchDecoder(self._session, model, input_ids, arguments)
        rows = range(len(input_ids))
        request_ids = [next(self._request_ids) for _ in rows]
        # Each row of a batch is a conversation of its own.
        if (name := extras["ssd_session"]) and isinstance(name, str):
            return decoder.run(request_ids, options, [{**extras, "ssd_session": f"{name}/{row}"} for row in rows])
        return decoder.run(request_ids, options, [extras for _ in rows])

    def _report_once(self, reason: str) -> None:
        if reason not in self._reported:
            self._reported.add(reason)
            LOG.warning(f"{reason}; decoding without drafts")


class GenerateInBlocks:
    """What replaces `generate` of a model within blocks of `SsdGenerate.enabled`."""

    def __init__(self, model: Any) -> None:
        self.blocks: list[SsdGenerate] = []
        """Those of the running blocks; only changed with `REPLACING`."""
        self._model = model
        self._generate = model.generate
        self._before = {name: value for name, value in vars(model).items() if name == "generate"}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `generate` of the model, with drafts if it can have them."""
        names = inspect.signature(type(self._model).generate)
        given = {**names.bind_partial(self._model, *args).arguments, **kwargs}
        configs = given.get("generation_config"), self._model.generation_config
        own = [given.get(name) for name in ("custom_generate", "assistant_model", "stop_strings")]
        # A stop string needs the tokenizer, which `generate` does not pass on to a `custom_generate`.
        own += [getattr(config, "stop_strings", None) for config in configs]
        if all(each is None for each in own):
            kwargs["custom_generate"] = (None, *self.blocks)[-1]
        return self._generate(*args, **kwargs)

    def restore(self) -> None:
        """Put the model's own `generate` back after the last block, unless someone else has replaced this one."""
        attributes = vars(self._model)
        if not self.blocks and attributes.get("generate") is self:
            del attributes["generate"]
            attributes.update(self._before)


def padding_of(max_draft: int) -> Padding:
    """Return the lengths of the drafts of a step: any length, to which those of all rows are padded."""
    return Padding(lengths=tuple(range(min(max_draft, MAX_LENGTHS - 1) + 1)))


def arguments_of_caller() -> dict[str, Any]:
    """Return the `streamer` and `synced_gpus` that were given to `generate`.

    `generate` does not pass them on to a `custom_generate`, but has put the prompt into the streamer, and whoever reads
    from it waits for an end. So they are read from the frame that called `SsdGenerate.__call__`.
    """
    caller = sys._getframe(2)
    given = caller.f_locals if caller.f_code.co_name == "generate" else {}
    return {name: given[name] for name in ("streamer", "synced_gpus") if given.get(name) is not None}


def decode_one(
    session: HostSession,
    request_id: int,
    options: RequestOptions,
    extras: dict[str, Any],
    model: Any,
    input_ids: Any,
    arguments: dict[str, Any],
) -> Any:
    """Run the host's assisted decoding, as one request of the session.

    options, extras: see `HostSession.start`. input_ids: int64 [1, P]. arguments: those of the host's decoding methods.
    Returns the same as these.
    """
    prompt = input_ids[0].tolist()
    candidates = Candidates(session, request_id, prompt)
    session.start(request_id, prompt, options, extras)
    try:
        result = type(model)._assisted_decoding(WithCandidates(model, candidates), input_ids, **arguments)
        text = getattr(result, "sequences", result)[0].tolist()
    except BaseException:
        session.finish(request_id, end=End.CANCELLED)
        raise
    session.finish(request_id, text)
    return result


class Candidates:
    """The drafts of one call of `generate`; has the interface of the host's `CandidateGenerator`."""

    requires_model_outputs = False

    def __init__(self, session: HostSession, request_id: int, prompt: list[int]) -> None:
        self.session = session
        self._request_id = request_id
        self._text = prompt.copy()
        self._clock = StepClock(session)

    def get_candidates(self, input_ids: Any, **_: Any) -> tuple[Any, None]:
        """Return the text with a draft after it, int64 [1, N + K]; `input_ids`: int64 [1, N], the text."""
        self._clock.end()
        is_first = input_ids.shape[1] == len(self._text)
        self._text += input_ids[0, len(self._text) :].tolist()
        draft = self.session.draft([(self._request_id, self._text)])[0]
        self.session.schedule({self._request_id: draft})
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
