"""A host that does what hosts do to a drafting session, and a drafter that records what the session told it.

The host counts steps and verified tokens itself, one by one: it is the slow twin of the session's bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drafter_service.plugins.options import End, HostLimits, RequestOptions
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.settings import PluginSettings
from ssd import Corpus, SuffixDrafter

VOCAB_SIZE = 50
PLACEHOLDER = -1
LIMITS = HostLimits(max_draft=6, vocab_size=VOCAB_SIZE, context_window=60, max_requests=12)


@dataclass
class Told:
    """What a drafter knows of one sequence."""

    prompt: list[int]
    arguments: dict[str, object]
    hints: list[int]
    output: list[int] = field(default_factory=list)
    offered: int = 0
    verified: int = 0
    steps: int = 0


class RecordingDrafter:
    """An embedded drafter that records its calls; it raises for each call that breaks the drafter's contract."""

    def __init__(self):
        self.inner = SuffixDrafter(corpus=Corpus(20_000))
        self.running: dict[int, Told] = {}
        self.learned: list[Told] = []
        self.calls = 0

    def start(self, sequence_id, prompt, **arguments):
        self.inner.start(sequence_id, prompt, **arguments)
        hints = arguments["hints"]
        self.running[sequence_id] = Told(prompt.tolist(), arguments, [] if hints is None else hints.tolist())

    def draft(self, progress):
        drafts = self.inner.draft(progress)
        self.calls += 1
        steps = np.ones(len(drafts), int) if progress.steps is None else progress.steps
        for at, sequence_id in enumerate(progress.sequence_ids.tolist()):
            tokens = progress.tokens[progress.offsets[at] : progress.offsets[at + 1]].tolist()
            told = self.running[sequence_id]
            told.output += tokens
            told.verified += int(progress.verified[at])
            told.steps += int(steps[at]) if tokens else 0
            told.offered = len(drafts.tokens_of(at))
        return drafts

    def finish(self, sequence_id, tokens, *, verified=0, steps=1, learn):
        self.inner.finish(sequence_id, tokens, verified=verified, steps=steps, learn=learn)
        told = self.running.pop(sequence_id)
        told.output += tokens.tolist()
        told.verified += verified
        told.steps += steps if len(tokens) else 0
        if learn:
            self.inner.corpus.refresh()
            self.learned.append(told)

    def close(self):
        self.inner.close()


@dataclass
class HostRequest:
    """A request of the simulated host."""

    prompt: list[int]
    options: RequestOptions
    seed: int
    output: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    verified: int = 0
    """Draft tokens that were verified so far."""
    steps: int = 0
    is_counted: bool = True
    """Whether the session can know both counts: not after output was taken back."""

    @property
    def text(self):
        return self.prompt + self.output

    @property
    def is_full(self):
        most = self.options.max_tokens
        return len(self.text) >= LIMITS.context_window or (most is not None and len(self.output) >= most)

    def target(self, text):
        """Return the target's next token: text that repeats, with a turn here and there."""
        return (text[-1] * 3 + (text[-2] if len(text) > 1 else 0) + self.seed * (len(text) % 11 == 0)) % 7


class SimulatedHost:
    """Runs requests with the drafts of a session, as a serving engine does."""

    def __init__(self, open_drafter=RecordingDrafter, settings: PluginSettings | None = None):
        """open_drafter: None for the drafters that the settings name."""
        self.reports: list[str] = []
        self.drafters: dict[tuple[str, str], object] = {}
        self.session = HostSession(
            settings or PluginSettings(sidecar="embedded"),
            LIMITS,
            self.reports.append,
            None if open_drafter is None else lambda *key: self.drafters.setdefault(key, open_drafter()),
        )
        self.requests: dict[str, HostRequest] = {}
        self.finished: list[HostRequest] = []
        """Finished requests that may be learned."""

    def add(self, name, prompt, options, seed=0):
        self.requests[name] = HostRequest(list(prompt), options, seed)
        self.session.start(name, prompt, options)

    def step(self, names, scheduling="all", drafted=None):
        """Run the target for some requests, then draft for `drafted`, by default the same requests.

        scheduling: of the drafts, "all" is verified, "cut" only one token, "none" nothing, or "padded" other tokens.
        """
        for name in dict.fromkeys(names):
            request = self.requests[name]
            if request.is_full:
                continue
            draft = request.draft
            scheduled = {"all": draft, "cut": draft[:1], "none": [], "padded": [PLACEHOLDER] * len(draft)}[scheduling]
            self.session.schedule({name: scheduled})
            request.verified += len(scheduled) if scheduling != "padded" else 0
            self._verify(request, scheduled)
            request.draft = []
        self.draft(names if drafted is None else drafted)

    def draft(self, names, placeholders=0):
        """Request drafts, in the order given and for repeated names too; check the limits that the host has.

        A drafter is called once, whatever the size of the batch.
        """
        texts = [(name, self.requests[name].text + [PLACEHOLDER] * placeholders) for name in names]
        before = {key: drafter.calls for key, drafter in self.drafters.items()}
        drafts = self.session.draft(texts)
        assert len(drafts) == len(texts)
        assert all(drafter.calls <= before.get(key, 0) + 1 for key, drafter in self.drafters.items())
        seen = set()
        for name, draft in zip(names, drafts, strict=True):
            request = self.requests[name]
            assert all(type(token) is int and 0 <= token < VOCAB_SIZE for token in draft)
            assert len(draft) <= LIMITS.max_draft
            if draft:
                assert name not in seen
                assert not placeholders
                assert len(request.text) + len(draft) < LIMITS.context_window
                if request.options.max_tokens is not None:
                    assert len(request.output) + len(draft) < request.options.max_tokens
            if name not in seen:
                request.draft = draft
            seen.add(name)

    def retract(self, name, tokens):
        """Take back output, and continue differently."""
        request = self.requests[name]
        if tokens and request.output:
            del request.output[-tokens:]
            request.draft, request.is_counted = [], False
            request.seed += 1

    def end(self, name, end=End.FINISHED, with_text=True):
        request = self.requests.pop(name)
        if not with_text:
            told = self.told(name)
            request.output = [] if told is None else told.output
        self.session.finish(name, request.text if with_text else None, end)
        if request.options.learns_after(end):
            self.finished.append(request)

    def vanish(self, name):
        """Forget a request without telling the session."""
        del self.requests[name]

    def told(self, name):
        """Return what the drafter knows of a request; None if it has no drafts."""
        tracked = self.session._requests.get(name)
        if tracked is None or tracked.namespace is None:
            return None
        return tracked.namespace.drafter.running[tracked.sequence_id]

    def _verify(self, request, scheduled):
        request.steps += 1
        for token in [*scheduled, None]:
            wanted = request.target(request.text)
            request.output.append(wanted)
            if token != wanted or request.is_full:
                return
