"""vLLM's requests and models in terms of the session layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from drafter_service.client.identity import ADAPTER_FILE, fingerprint
from drafter_service.observability.facts import ModelIdentity
from drafter_service.plugins.options import End, RequestOptions
from drafter_service.plugins.settings import identity_of
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


def options_of(request: Any, adapter: str) -> RequestOptions:
    """Return the options of a `Request`, apart from those in its `extra_args`."""
    return RequestOptions(
        max_tokens=request.max_tokens,
        has_stop_strings=bool(request.sampling_params.stop),
        salt=request.cache_salt or "",
        adapter=adapter,
        session=request.session_id or "",
    )


class Adapters:
    """Fingerprints of LoRA adapters, each computed once."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        """warn: writes a sentence to the host's log."""
        self._warn = warn
        self._fingerprints: dict[tuple[str, str], str] = {}

    def fingerprint(self, lora: Any) -> str:
        """Return the fingerprint of a `LoRARequest`; "" for None.

        If its file cannot be read, as with a path that only vLLM resolves, it is identified by its name and path.
        """
        if lora is None:
            return ""
        key = (lora.lora_name, lora.lora_path)
        if key not in self._fingerprints:
            try:
                self._fingerprints[key] = fingerprint(Path(lora.lora_path) / ADAPTER_FILE)
            except UserError as problem:
                self._warn(f"{problem}; the adapter is identified by its name and path")
                self._fingerprints[key] = ":".join(key)
        return self._fingerprints[key]


def model_identity_of(model: Any, warn: Callable[[str], None]) -> ModelIdentity:
    """Return the identity of a `ModelConfig`. warn: writes a sentence to the host's log."""
    return identity_of(model.model, model.get_vocab_size(), warn, revision=model.revision or "")
