"""Connect to a sidecar that drafts, or whose corpus a replica in this process copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from drafter_service.client import DrafterClient
from drafter_service.client.connection import AbsentError
from drafter_service.client.identity import model_identity

if TYPE_CHECKING:
    from drafter_service.client.protocol import Welcome
    from engine.drafters.options import RemoteOptions, Resources
    from ssd.config import DrafterConfig


def connect(config: DrafterConfig, options: RemoteOptions, resources: Resources) -> DrafterClient:
    """Return the client of the sidecar at `resources.address`. Raises UserError as `build_drafter`."""
    # The service keeps one namespace for each model and adapter.
    folder = None if resources.target is None else resources.target.folder
    address, warn = resources.address, resources.warn
    kind: Callable[..., DrafterClient] = DrafterClient
    meanwhile = "continuing without drafts until there is one"
    if options.drafting == "replica":
        from drafter_service.client.replica import ReplicaClient

        meanwhile = "drafting from the copy for 30 s, then from running requests alone"
        kind = partial(ReplicaClient, config=replace(config, options={}), max_tokens=config.capacity)

    def welcomed(welcome: Welcome) -> None:
        resources.notify(f"drafts come from the namespace {welcome.namespace_state}")
        advice = welcome.namespace_state.advice("give --drafter-option namespace={}")
        if advice and resources.adapter is None:  # An adapter has a namespace of its own.
            warn(advice)

    make = partial(
        kind,
        address,
        deadline_s=options.deadline_s,
        model=None if folder is None else model_identity(folder, adapter=resources.adapter),
        namespace=options.namespace if resources.adapter is None else "",
        host="ssd-engine",
        draft_shape=config.draft_shape,
        on_welcome=welcomed,
        on_lost=lambda reason: warn(f"no connection to the drafter at {address} ({reason}); {meanwhile}"),
        on_resumed=lambda: warn(f"reconnected to the drafter at {address}; drafting resumes"),
    )
    if resources.adapter is not None:
        # This drafter is made while requests run, so nothing may wait for its connection.
        return make(required=False)
    try:
        return make()
    except AbsentError:
        if resources.require_sidecar:
            raise
        return make(required=False)
