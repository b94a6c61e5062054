"""The drafters of a host: one per namespace, since a client of the sidecar has one namespace; reports of lost ones."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from drafter_service.client import DrafterClient
from drafter_service.client.protocol import Welcome
from drafter_service.plugins.options import HostLimits
from drafter_service.plugins.settings import EMBEDDED, PluginSettings
from drafter_service.transport.wire import MAX_STEP_TIMES
from ssd.config import MAX_DRAFT, DrafterConfig, DraftShape
from ssd.errors import UserError
from ssd.types import StepTime

if TYPE_CHECKING:  # It imports numba.
    from ssd.drafter import SuffixDrafter

    HostDrafter = DrafterClient | SuffixDrafter

MAX_NAMESPACES = 8
"""Maximum number of namespaces in use at a time beside the default one. A step calls the drafters of its namespaces one
after another."""
DEFAULT = "", ""
"""Adapter and salt of requests that have neither. Their namespace is not closed for others."""
CLOSE_S = 3.0
"""Maximum wait for all drafters to close, in seconds: vLLM kills an engine that takes more than 5 s to stop."""


@dataclass(eq=False)
class Namespace:
    """A namespace in use."""

    drafter: HostDrafter | None
    """None if it could not be opened."""
    running: int = 0
    """Number of its running sequences."""
    pause_steps: int = 0
    """Number of steps in which its drafter is not called, because drafts have cost more time than they saved."""
    step_times: list[StepTime] = field(default_factory=list)
    """The host's steps since the drafter was last called."""
    drafting_s: float = 0.0
    """Seconds that the drafter has taken for the host's current step."""


class ConnectionLog:
    """Reports a loss that concerns several connections once, and its end once. Any thread may call it."""

    def __init__(self, address: str, report: Callable[[str], None], *, has_copy: bool = False) -> None:
        """address: the drafter's. report: writes a message to the host's log. has_copy: see `PluginSettings`."""
        self._address = address
        self._has_copy = has_copy
        self.has_welcome = False
        """Whether the service has accepted a connection before."""
        self._report = report
        self._reasons: set[str] = set()
        """Reported reasons since a connection last worked again."""
        self._is_lost = False
        """Whether one of them is not a refusal."""
        self._lock = threading.Lock()

    def lost(self, reason: str, is_refused: bool) -> None:
        """Record that a connection was lost. is_refused: whether the service refuses it for good."""
        with self._lock:
            if reason in self._reasons or (self._is_lost and not is_refused):
                return
            self._reasons.add(reason)
            self._is_lost |= not is_refused
        rest = "without drafts"
        if self._has_copy:
            rest = "with drafts from running requests alone"
            if self.has_welcome:
                rest = "with drafts from the copy for at most 30 s, then from running requests"
        self._report(f"no connection to the drafter at {self._address} ({reason}); continuing {rest}")

    def resumed(self) -> None:
        """Record that a lost connection works again."""
        with self._lock:
            is_reported = bool(self._reasons)
            self._reasons.clear()
            self._is_lost = False
        if is_reported:
            self._report(f"reconnected to the drafter at {self._address}; drafting resumes")


class HostNamespaces:
    """Opens drafters on first use and closes those not used for longest. One thread at a time may use it."""

    def __init__(
        self,
        settings: PluginSettings,
        limits: HostLimits,
        report: Callable[[str], None],
        report_once: Callable[[str, str], None],
        open_drafter: Callable[[str, str], HostDrafter] | None = None,
        inform: Callable[[str], None] = lambda _: None,
    ) -> None:
        """report: called with a message, from any thread, when connections are lost or work again. report_once: called
        in the same way with a kind of problem and a message, which is ignored if there was one of this kind.
        inform: called with the namespace of requests without cache salt, once it is known. open_drafter: opens the
        drafter of an adapter and a salt; None: as the settings say.
        """
        self._open_drafter = open_drafter or self._drafter
        self._settings = settings
        self._limits = limits
        self._report, self._report_once, self._inform = report, report_once, inform
        self._connections = ConnectionLog(settings.sidecar, report, has_copy=settings.has_copy)
        self.opened: OrderedDict[tuple[str, str], Namespace] = OrderedDict()
        """By adapter and salt, least recently used first."""

    def find(self, adapter: str, salt: str) -> Namespace | None:
        """Return the namespace of an adapter and a salt; None if too many others have running sequences.

        Raises UserError if it cannot be opened, when it is called the first time.
        """
        key = adapter, salt
        if key not in self.opened:
            count = len(self.opened.keys() - {DEFAULT})
            if key != DEFAULT and count >= MAX_NAMESPACES and not self._close_idle():
                return None
            # A failure to open is kept, so that it is reported once.
            self.opened[key] = Namespace(None)
            self.opened[key].drafter = self._open_drafter(adapter, salt)
        self.opened.move_to_end(key)
        return self.opened[key]

    def take_paused(self) -> list[Namespace]:
        """Return the namespaces whose drafters are not called in this step, and count it."""
        paused = [namespace for namespace in self.opened.values() if namespace.pause_steps]
        for namespace in paused:
            namespace.pause_steps -= 1
        return paused

    def record_step(self, tokens: int, sequences: int, seconds: float) -> None:
        """Record a step of the host, to be sent with the next request for drafts of each namespace."""
        for namespace in self.opened.values():
            namespace.step_times.append(StepTime(tokens, sequences, seconds, namespace.drafting_s))
            del namespace.step_times[:-MAX_STEP_TIMES]
            namespace.drafting_s = 0.0

    def close(self) -> None:
        """Close all drafters, at the same time, since each may take seconds; wait `CLOSE_S` at most."""
        threads = [_close(namespace.drafter) for namespace in self.opened.values() if namespace.drafter is not None]
        self.opened.clear()
        end = monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, end - monotonic()))

    def _close_idle(self) -> bool:
        """Close the namespace that was not used for longest and has no running sequences; return whether there is one.

        Closing a connection may take seconds, so another thread does it.
        """
        others = (key for key, namespace in self.opened.items() if key != DEFAULT and not namespace.running)
        if (idle := next(others, None)) is None:
            return False
        drafter = self.opened.pop(idle).drafter
        if drafter is not None:
            _close(drafter)
        if self._settings.sidecar == EMBEDDED:
            self._report_once(
                "closed", f"more than {MAX_NAMESPACES} cache salts and adapters; the text of unused ones is forgotten"
            )
        return True

    def _is_refused(self, adapter: str, salt: str) -> bool:
        """Return whether the service refuses the connection of a namespace."""
        namespace = self.opened.get((adapter, salt))
        return namespace is not None and isinstance(namespace.drafter, DrafterClient) and namespace.drafter.is_refused

    def _drafter(self, adapter: str, salt: str) -> HostDrafter:
        settings = self._settings
        shape: DraftShape = "tree" if self._limits.trees else "path"
        if settings.sidecar == EMBEDDED and settings.shadow:
            raise UserError('"shadow" needs a sidecar; set "sidecar" to the address of one, not "embedded"')
        max_draft = min(self._limits.max_draft, MAX_DRAFT)
        config = DrafterConfig(capacity=settings.capacity, max_draft=max_draft, draft_shape=shape)
        connect: Callable[..., DrafterClient] = DrafterClient
        if settings.sidecar == EMBEDDED:
            from ssd.budget.curve import StepCurve
            from ssd.drafter import SuffixDrafter

            self._inform(f"up to {max_draft} draft tokens per step from a corpus in this process")
            return SuffixDrafter(config, curve=StepCurve.unknown(self._limits.padding), sorts_in_thread=True)
        if settings.has_copy:
            from drafter_service.client.replica import ReplicaClient

            connect = partial(ReplicaClient, config=config, max_tokens=settings.capacity, on_copy_lost=self._report)
        return connect(
            settings.sidecar,
            deadline_s=settings.deadline_s,
            poll_s=settings.poll_s,
            model=replace(settings.model, adapter=adapter),
            namespace=namespace_name(settings, adapter, salt),
            host=settings.host,
            engine=settings.engine,
            access=settings.access,
            draft_shape=shape,
            padding=self._limits.padding,
            shadow=settings.shadow,
            required=False,
            on_welcome=partial(self._welcomed, is_default=not (salt or adapter)),
            on_lost=lambda reason: self._connections.lost(reason, self._is_refused(adapter, salt)),
            on_resumed=self._connections.resumed,
        )

    def _welcomed(self, welcome: Welcome, is_default: bool) -> None:
        """Say what the service does not allow, which namespace is the default one, and whether text is elsewhere."""
        self._connections.has_welcome = True
        longest, address = self._limits.max_draft, self._settings.sidecar
        if longest > welcome.max_draft:
            self._report_once(
                "max_draft",
                f"drafts have at most {welcome.max_draft} tokens, not {longest}, because the drafter at {address} "
                f"allows no more; restart it with --max-draft {min(longest, MAX_DRAFT)}",
            )
        if not welcome.may_learn:
            self._report_once(
                "may_learn",
                "outputs are not remembered, because this host lacks the right to learn in namespace "
                f"{welcome.namespace!r} of the drafter at {address}",
            )
        if is_default:
            self._inform(f"up to {longest} draft tokens per step from the namespace {welcome.namespace_state}")
            if advice := welcome.namespace_state.advice('set "namespace" to "{}"'):
                self._report_once("namespace", advice)


def _close(drafter: HostDrafter) -> threading.Thread:
    """Close a drafter in a thread of its own, and return this."""
    thread = threading.Thread(target=drafter.close, name="ssd-close", daemon=True)
    thread.start()
    return thread


def namespace_name(settings: PluginSettings, adapter: str, salt: str) -> str:
    """Return the name of the namespace of an adapter and a salt; "" for the one that is named after the model.

    The name does not contain the salt, which may be a secret.
    """
    if not salt and not (adapter and settings.namespace):
        return settings.namespace
    model = settings.model
    parts = (model.name, model.tokenizer, adapter, salt)
    digest = hashlib.sha256("".join(f"{len(part)}:{part}" for part in parts).encode()).hexdigest()[:32]
    return f"{settings.namespace or 'salted'}@{digest}"
