"""What a client counts."""

from __future__ import annotations

from dataclasses import dataclass

from drafter_service.stubs import drafter_pb2 as pb


@dataclass
class Counters:
    """Totals since the client began."""

    timeouts: int = 0
    """Steps that went without drafts because the service was late, or had been late and was left alone."""
    dropped: int = 0
    """Answers that came too late."""
    resyncs: int = 0
    """Sequences that the service lost, so that they have to be told again."""
    reconnects: int = 0
    """Connections that were made again."""
    malformed: int = 0
    """Drafts that were no drafts: too long, outside the vocabulary, or not fitting together."""
    unlearned: int = 0
    """Finished sequences that were to be learned and were let go, since too much waited for the service."""

    transport: str = ""
    """What the connection goes over now: "socket", the socket for steps, or "grpc"; empty while there is none."""

    def message(self) -> pb.ClientCounters:
        """What the service is told of them."""
        return pb.ClientCounters(
            timeouts=self.timeouts,
            dropped=self.dropped,
            resyncs=self.resyncs,
            reconnects=self.reconnects,
        )
