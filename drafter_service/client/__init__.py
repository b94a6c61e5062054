"""The clients that engines draft through: the same face as the embedded drafter, and never in the engine's way.

A step waits for its drafts until a deadline; without an answer there is none for that step. A connection that is lost
costs drafts and nothing else: it is made again in the background, and the service is told what it missed.
"""

from drafter_service.client.aio import AsyncDrafterClient
from drafter_service.client.sync import DrafterClient

__all__ = ["AsyncDrafterClient", "DrafterClient"]
