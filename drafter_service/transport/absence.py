"""Messages about an address at which no drafter answers, or one that is not ready to serve."""

from __future__ import annotations

STATE = "ssd-drafter-state"
"""Metadata of responses to health checks, such as "compiling kernels, 40 %"."""
NOT_READY = "not ready: "
"""Start of the details of calls that are refused with UNAVAILABLE while a service is not ready; its state follows."""

CLOSED = ("Socket closed", "Connection reset by peer")
"""Errors of a connection that was accepted and then closed, as a server with TLS does without a handshake."""

UNRESOLVED = ("Domain name not found", "DNS server", "Name or service not known", "name resolution")
"""Parts of the errors for names of hosts that do not resolve, by c-ares and by the operating system."""


def system_error(details: str) -> str:
    """Return the operating system's error, such as "Connection refused", which ends the text of a gRPC error."""
    return details.rpartition(": ")[2].rstrip("]")


def absence(address: str, reason: str) -> str:
    """Return a message that no drafter answers at an address, with the reason and what to do."""
    if "denied" in reason:
        return f"you may not use {address} ({reason}); ask its owner, or see `ssd-drafter serve --socket-mode`"
    if any(error in reason for error in CLOSED):
        return f"no drafter answers at {address} ({reason}); if it uses TLS, give its CA with --ca or `ClientAccess`"
    if any(error in reason for error in UNRESOLVED):
        return f"the host of {address} does not resolve ({reason}); check its name"
    return f"no drafter answers at {address} ({reason}); {start_one(address)}"


def start_one(address: str) -> str:
    """Return advice to start a drafter at an address."""
    return f"start one with: ssd-drafter serve --listen {address}"
