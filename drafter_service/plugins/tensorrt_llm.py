"""Drafts for the PyTorch backend of TensorRT-LLM.

    ssd = SsdDrafter("/models/qwen3-8b", max_draft_len=8)
    config = UserProvidedDecodingConfig(drafter=ssd, resource_manager=ssd, max_draft_len=8)
    llm = LLM("/models/qwen3-8b", speculative_config=config, disable_overlap_scheduler=True)

One object is the host's drafter, which makes the drafts of each step, and its resource manager, which is told when
requests end. The host sends it to the process that runs the model, so it connects with its first request. The class
inherits the host's and is made when it is first used: TensorRT-LLM is imported then, and only then.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from drafter_service.plugins.options import End, HostLimits, RequestOptions
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.settings import HostLog, host_settings, look_for_sidecar, untested
from ssd.budget.padding import Padding

LOG = HostLog("tensorrt_llm")

TESTED = ("1.2",)
"""Versions of TensorRT-LLM, without the last number."""

MAX_DRAFT = 8


def __getattr__(name: str) -> Any:
    """Make the class `SsdDrafter` when a user or pickle first uses it."""
    if name != "SsdDrafter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return drafter_class()


@cache
def drafter_class() -> type:
    """Return the class `SsdDrafter`."""
    from tensorrt_llm._torch.pyexecutor.resource_manager import BaseResourceManager
    from tensorrt_llm._torch.speculative.drafter import Drafter

    class SsdDrafter(Drafter, BaseResourceManager):  # type: ignore[misc]
        """The drafter and the resource manager of a `UserProvidedDecodingConfig`."""

        # The host takes back rejected tokens by the padded length of a draft, for which it then needs pages.
        _needs_padding_kv_extension = True

        def __init__(
            self,
            model: Path | str,
            *,
            max_draft_len: int = MAX_DRAFT,
            vocab_size: int | None = None,
            **settings: Any,
        ) -> None:
            """Prepare drafts of at most `max_draft_len` tokens, as in the host's config.

            model: folder of the model, or its name on the hub. vocab_size: needed if its `config.json` is neither
            there nor in the hub's cache. settings: see `PluginSettings`; by default those in the environment variable
            `SSD_PLUGIN`. Raises ValueError if max_draft_len is not positive or without a vocabulary size, and UserError
            for settings that are not valid.
            """
            super().__init__(max_draft_len=max_draft_len, max_total_draft_tokens=max_draft_len)
            self.max_draft_len = max_draft_len
            own = host_settings(settings, "tensorrt_llm", str(model), vocab_size or 0, LOG.warning)
            if not own.model.vocab_size:
                raise ValueError(f"cannot read config.json of {model}: give its vocab_size")
            self._ssd_limits = HostLimits(
                max_draft_len, vocab_size or own.model.vocab_size, padding=Padding(lengths=(max_draft_len,))
            )
            self._ssd_settings = own
            look_for_sidecar(own, LOG.warning)
            self._ssd_session: HostSession | None = None
            self._ssd_is_supported = True

        def __getstate__(self) -> dict[str, Any]:
            """Leave the connection out: each process has its own."""
            return {**vars(self), "_ssd_session": None}

        def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:  # noqa: ARG002
            """Set `py_draft_tokens` of the batch's requests that generate."""
            requests = scheduled_requests.generation_requests
            for request in requests:
                request.py_draft_tokens = []
            if self._ssd_session is None and self._ssd_is_supported:
                if reason := reason_against():
                    self._ssd_is_supported = False
                    LOG.warning(f"{reason}; continuing without drafts")
                    return
                self._ssd_session = HostSession(self._ssd_settings, self._ssd_limits, LOG.warning, inform=LOG.info)
                self._ssd_session.open()
            if self._ssd_session is not None:
                set_drafts(self._ssd_session, requests, self.max_draft_len)

        def get_max_resource_count(self) -> int:
            """Return a number that does not limit the host."""
            return 1 << 30

        def get_needed_resource_to_completion(self, request: Any) -> int:  # noqa: ARG002
            """Return 0."""
            return 0

        def free_resources(self, request: Any) -> None:
            """End a request, unless the host only paused it: it frees the resources of both."""
            if (session := self._ssd_session) is None:
                return
            with session.guarded():
                if request.is_finished and request.py_request_id in session:
                    end = End.CANCELLED if request.is_finished_due_to_cancellation else End.FINISHED
                    session.finish(request.py_request_id, request.get_tokens(0), end)

        def shutdown(self) -> None:
            """Close the connection, or the embedded drafter."""
            if self._ssd_session is not None:
                self._ssd_session.close()

    SsdDrafter.__qualname__ = "SsdDrafter"  # pickle looks the class up by its name.
    return SsdDrafter


def set_drafts(session: HostSession, requests: list[Any], max_draft: int) -> None:
    """Set `py_draft_tokens` of each request that has a draft, at most `max_draft` tokens: the host may lower it."""
    with session.guarded():
        # The host makes up requests to fill a batch.
        running = [each for each in requests if not (each.is_attention_dp_dummy or each.is_cuda_graph_dummy)]
        texts = [(request.py_request_id, request.get_tokens(0)) for request in running]
        for request, (request_id, text) in zip(running, texts, strict=True):
            if request_id not in session:
                session.start(request_id, text[: request.py_orig_prompt_len], options_of(request))
        for request, draft in zip(running, session.draft(texts), strict=True):
            request.py_draft_tokens = draft[:max_draft]
            # The host pads the list itself, in place.
            session.schedule({request.py_request_id: draft[:max_draft]})


def options_of(request: Any) -> RequestOptions:
    """Return the options of a host's request."""
    salt, adapter = getattr(request, "cache_salt_id", None), getattr(request, "lora_task_id", None)
    return RequestOptions(
        max_tokens=request.py_max_new_tokens,
        salt="" if salt is None else str(salt),
        adapter="" if adapter is None else str(adapter),
    )


def reason_against() -> str:
    """Return why the host cannot have drafts, or ""."""
    from tensorrt_llm._utils import mpi_world_size

    if reason := untested("TensorRT-LLM", version("tensorrt_llm"), TESTED):
        return reason
    if mpi_world_size() > 1:
        return "several ranks are not supported, because they could get different drafts"
    return ""
