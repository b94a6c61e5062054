"""The client of the drafter service, with the interface of the embedded drafter.

A step waits for its drafts until a deadline and then continues without them. A lost connection costs only drafts: it is
re-established in the background, and running sequences are registered again.
"""

from drafter_service.client.client import DrafterClient

__all__ = ["DrafterClient"]
