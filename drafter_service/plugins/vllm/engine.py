"""vLLM's configurations, requests and models in terms of the session layer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafter_service.client.identity import ADAPTER_FILE, fingerprint, process_name
from drafter_service.plugins.options import End, HostLimits, RequestOptions
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.settings import HostLog, PluginSettings, host_settings, look_for_sidecar, read_settings
from drafter_service.plugins.vllm.variants import NETWORKS, Variant, choose
from drafter_service.transport.wire import MAX_ENGINE_NAME
from ssd.budget.padding import MAX_SIZES, NO_PADDING, Padding
from ssd.config import MAX_DRAFT
from ssd.errors import UserError

LOG = HostLog("vllm")


def variant_of(vllm_config: Any) -> Variant:
    """Return the variant of a configuration, and log why there is none.

    Raises ValueError for a configuration with which the engine must not start.
    """
    choice = choose(vllm_config)
    if choice.is_error:
        raise ValueError(f"ssd-drafter: {choice.reason}")
    if choice.variant is Variant.NONE:
        LOG.warning(f"{choice.reason}; serving without drafts")
    return choice.variant


def padding_of(compilation: Any) -> Padding:
    """Return the shapes that vLLM pads steps to, by its `CompilationConfig`: those of its CUDA graphs."""
    if compilation.cudagraph_mode is None or compilation.cudagraph_mode.name == "NONE":
        return NO_PADDING
    sizes = sorted({*(compilation.cudagraph_capture_sizes or ())}, reverse=True)
    interval = -(-len(sizes) // MAX_SIZES)  # A drafter takes a limited number.
    return Padding(tuple(reversed(sizes[:: max(1, interval)])))


def engine_name(name: str, parallel: Any) -> str:
    """Return the name of an engine, with its data-parallel rank above 0: all ranks have the same settings.

    parallel: vLLM's `ParallelConfig`. For a dense model its `data_parallel_rank` is 0 in every rank; its index is not.
    """
    rank = getattr(parallel, "data_parallel_index", 0)
    suffix = f":dp{rank}" if rank else ""
    return (name or process_name())[: MAX_ENGINE_NAME - len(suffix)] + suffix


def look_before_loading(vllm_config: Any) -> None:
    """Log that there is no sidecar, before the first worker of an engine loads the model.

    Raises UserError for settings that are not valid.
    """
    if vllm_config.parallel_config.rank == 0:
        look_for_sidecar(read_settings({}), LOG.warning)


def open_session(vllm_config: Any, padding: Padding = NO_PADDING) -> HostSession:
    """Return the session of an engine. padding: see `HostLimits`. Raises UserError for settings that are not valid."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    drafts = vllm_config.speculative_config.num_speculative_tokens
    limits = HostLimits(
        max_draft=min(drafts, MAX_DRAFT),
        vocab_size=model.get_vocab_size(),
        context_window=model.max_model_len,
        max_requests=max(HostLimits.max_requests, 2 * scheduler.max_num_seqs),
        padding=padding,
        has_network=vllm_config.speculative_config.method in NETWORKS,
    )
    settings = settings_of(model, LOG.warning)
    settings = replace(settings, engine=engine_name(settings.engine, vllm_config.parallel_config))
    session = HostSession(settings, limits, LOG.warning, inform=LOG.info)
    session.open()
    return session


ENDS = {
    "FINISHED_STOPPED": End.FINISHED,
    "FINISHED_LENGTH_CAPPED": End.FINISHED,
    "FINISHED_REPETITION": End.FINISHED,
    "FINISHED_ABORTED": End.ABORTED,
}
"""By the name of a finished `RequestStatus`. Requests that end by a stop string are aborted by the front end."""


def end_of(status: str) -> End:
    """Return how a request with a finished status ended."""
    return ENDS.get(status, End.CANCELLED)


class OptionsReader:
    """Reads the options of requests. Files of LoRA adapters are read in a thread: a step of the host must not wait."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        """warn: writes a message to the host's log; called in any thread."""
        self._warn = warn
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="ssd-adapters")
        self._fingerprints: dict[tuple[str, str], Future[str]] = {}
        self._has_failed = False

    def options_of(self, request: Any) -> RequestOptions | None:
        """Return the options of a `Request`, apart from those in its `extra_args`; None if it has no drafts.

        It has none if its prompt has no tokens or is streamed, if it generates none, while the file of its adapter is
        being read, or if its options cannot be read.
        """
        try:
            return self._options_of(request)
        except Exception as problem:  # It would end a step of the host.
            if not self._has_failed:
                self._warn(f"options of a request cannot be read ({type(problem).__name__}); it has no drafts")
            self._has_failed = True
            return None

    def _options_of(self, request: Any) -> RequestOptions | None:
        if request.sampling_params is None or request.prompt_embeds is not None:
            return None
        if request.resumable:  # Each part of its prompt has options of its own, and may be private.
            return None
        if (adapter := self.fingerprint(request.lora_request)) is None:
            return None
        return RequestOptions(
            max_tokens=request.max_tokens,
            has_stop_strings=bool(request.sampling_params.stop),
            salt=request.cache_salt or "",
            adapter=adapter,
            session=request.session_id or "",
        )

    def fingerprint(self, lora: Any) -> str | None:
        """Return the fingerprint of a `LoRARequest`; "" for None; None while its file is being read."""
        if lora is None:
            return ""
        key = (lora.lora_name, lora.lora_path)
        if key not in self._fingerprints:
            self._fingerprints[key] = self._reader.submit(self._read, *key)
        reading = self._fingerprints[key]
        return reading.result() if reading.done() else None

    def _read(self, name: str, path: str) -> str:
        """Return the fingerprint of a file; name and path if it cannot be read, as with one that only vLLM resolves."""
        try:
            return fingerprint(Path(path) / ADAPTER_FILE)
        except Exception as problem:
            reason = problem if isinstance(problem, UserError) else f"cannot read {path} ({type(problem).__name__})"
            self._warn(f"{reason}; the adapter is identified by its name and path")
            return f"{name}:{path}"


def settings_of(model: Any, warn: Callable[[str], None]) -> PluginSettings:
    """Return the settings for a `ModelConfig`. Raises UserError for settings that are not valid.

    warn: writes a message to the host's log.
    """
    return host_settings({}, "vllm", model.model, model.get_vocab_size(), warn, revision=model.revision or "")
