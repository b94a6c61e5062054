"""vLLM's requests and models in terms of the session layer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from drafter_service.client.identity import ADAPTER_FILE, fingerprint
from drafter_service.plugins.options import End, RequestOptions
from drafter_service.plugins.settings import PluginSettings, host_settings
from ssd.errors import UserError

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

    def options_of(self, request: Any) -> RequestOptions | None:
        """Return the options of a `Request`, apart from those in its `extra_args`; None if it has no drafts.

        It has none if its prompt has no tokens, if it generates none, or while the file of its adapter is being read.
        """
        if request.sampling_params is None or request.prompt_embeds is not None:
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
        except UserError as problem:
            self._warn(f"{problem}; the adapter is identified by its name and path")
            return f"{name}:{path}"


def settings_of(model: Any, warn: Callable[[str], None]) -> PluginSettings:
    """Return the settings for a `ModelConfig`. Raises UserError for settings that are not valid.

    warn: writes a message to the host's log.
    """
    return host_settings({}, "vllm", model.model, model.get_vocab_size(), warn, revision=model.revision or "")
