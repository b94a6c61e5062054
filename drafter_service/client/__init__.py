"""The client of the drafter service, with the interface of the embedded drafter.

A step waits for its drafts until a deadline and goes on without them afterwards. A lost connection costs drafts and
nothing else: it is made again in the background, and running sequences are registered again.
"""

from drafter_service.client.client import DrafterClient

__all__ = ["DrafterClient"]
