"""Replay recorded requests with a drafter, and count what its drafts gain.

from pathlib import Path
from ssd import Corpus, DrafterConfig, SuffixDrafter
from ssd.replay import Recording, replay

config = DrafterConfig(draft_shape="tree", cost=0.02)
drafter = SuffixDrafter(config, corpus=Corpus.from_config(config))
counts = replay(Recording.load(Path("recording.npz")), drafter, concurrency=4)
print(counts.tokens_per_step, counts.speedup_at(0.02))
"""

from typing import TYPE_CHECKING

from ssd.replay.recording import RecordedRequest, Recording

if TYPE_CHECKING:
    from ssd.replay.replaying import Counts as Counts
    from ssd.replay.replaying import Step as Step
    from ssd.replay.replaying import replay as replay

__all__ = ["Counts", "RecordedRequest", "Recording", "Step", "replay"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Recordings are read without the kernels, which take seconds to import.
    from ssd.replay import replaying

    return getattr(replaying, name)
