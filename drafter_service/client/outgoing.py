"""A message on its way out. Its texts are copied into it by whoever sends it, not by whoever has it sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from drafter_service.client.about import About
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import pack


class Beginning(NamedTuple):
    """A sequence that the service does not know. Its arrays do not change any more."""

    wire_id: int
    about: About
    committed: np.ndarray
    """uint32 [n]."""


class Ending(NamedTuple):
    """What the service is still to be told of a sequence that is over."""

    wire_id: int
    tokens: np.ndarray
    """uint32 [n]; they do not change any more."""
    learn: bool
    verified: int
    steps: int


@dataclass(slots=True, eq=False)
class Outgoing:
    """A request without the texts that belong into it, and these."""

    request: pb.DraftRequest = field(default_factory=pb.DraftRequest)
    starts: list[Beginning] = field(default_factory=list)
    finishes: list[Ending] = field(default_factory=list)

    @property
    def text_bytes(self) -> int:
        """Of its texts."""
        if not self.starts and not self.finishes:
            return 0
        begun = sum(start.about.prompt.nbytes + start.committed.nbytes for start in self.starts)
        return begun + sum(finish.tokens.nbytes for finish in self.finishes)

    def message(self) -> pb.DraftRequest:
        """The whole request. To be called once."""
        for start in self.starts:
            self.request.starts.add(
                sequence_id=start.wire_id,
                prompt=pack(start.about.prompt, "u4"),
                committed=pack(start.committed, "u4"),
                session=start.about.session,
                request=start.about.request,
                is_private=not start.about.learn,
            )
        for finish in self.finishes:
            self.request.finishes.add(
                sequence_id=finish.wire_id,
                tokens=pack(finish.tokens, "u4"),
                learn=finish.learn,
                verified=finish.verified,
                steps=finish.steps,
            )
        return self.request
