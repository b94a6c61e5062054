"""Replay recorded requests with a drafter, and count what its drafts gain.

from pathlib import Path
from ssd import Corpus, DrafterConfig, SuffixDrafter
from ssd.replay import Recording, replay

config = DrafterConfig(draft_shape="tree", cost=0.02)
drafter = SuffixDrafter(config, corpus=Corpus.from_config(config))
counts = replay(Recording.load(Path("recording.npz")), drafter, concurrency=4)
print(counts.tokens_per_step, counts.speedup_at(0.02))
"""

from ssd.replay.recording import RecordedRequest, Recording
from ssd.replay.replaying import Counts, Step, replay

__all__ = ["Counts", "RecordedRequest", "Recording", "Step", "replay"]
