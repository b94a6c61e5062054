"""Who runs in the next step, with how many tokens, and on which pages."""

from __future__ import annotations

from collections import deque
from math import ceil

from engine.config import EngineConfig
from engine.scheduling.page_hashes import PageNames
from engine.scheduling.pages import PagePool
from engine.scheduling.sequence import Sequence


class Scheduler:
    """First come, first served.

    Pages are taken as sequences grow. When they run out, the newest sequence gives its pages back and waits again, to
    be recomputed later; so the oldest always goes on, and every sequence becomes the oldest in time.
    """

    def __init__(self, config: EngineConfig, pages: PagePool) -> None:
        self.pages = pages
        self.waiting: deque[Sequence] = deque()
        """In the order of arrival, all later than those that run."""
        self.running: list[Sequence] = []
        """In the order of arrival."""
        self.preemptions = 0
        """How often a sequence had to give its pages back."""
        self._config = config
        self._watermark = ceil(config.watermark * pages.count)

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def find(self, sequence_id: int) -> Sequence | None:
        """The sequence of that id, if it waits or runs."""
        for sequences in (self.running, self.waiting):
            for sequence in sequences:
                if sequence.sequence_id == sequence_id:
                    return sequence
        return None

    def admit(self) -> list[Sequence]:
        """Move waiting sequences to running ones while there is room; returns those that begin or begin again."""
        admitted: list[Sequence] = []
        if not self.waiting:
            return admitted
        promised = sum(self._lacking(sequence, len(sequence)) for sequence in self.running)
        while self.waiting and len(self.running) < self._config.max_sequences:
            sequence = self.waiting[0]
            owned = self._owned_prefix(sequence)
            needed = promised + self.pages.pages_for(len(sequence)) - owned
            # What fits alone is let in when it is alone.
            if self.running and needed + self._watermark > self.pages.free:
                break
            self.running.append(self.waiting.popleft())
            self._reuse(sequence)
            promised += self._lacking(sequence, len(sequence))
            admitted.append(sequence)
        return admitted

    def schedule(self) -> list[Sequence]:
        """The sequences of the next step, each with its `scheduled` tokens and `draft_room` set and pages for both.

        Every running sequence but those in the middle of their prompt needs one token and its draft; what is left of
        the step's tokens goes to prompts, in the order of arrival. A sequence waits a step if another one computes the
        page that it needs next.
        """
        decoding = [sequence for sequence in self.running if sequence.computed == len(sequence) - 1]
        budget = self._config.max_step_tokens - len(decoding) * (1 + self._config.max_draft)
        step: list[Sequence] = []
        coming: set[bytes] = set()
        # Preemption shortens this list from its end, while it is gone through from its start.
        for sequence in self.running:
            is_prompt = sequence.computed < len(sequence) - 1
            if is_prompt:
                self._reuse(sequence)
                if self._is_coming(sequence, coming):
                    continue
                # The end of a prompt can carry a draft as well.
                sequence.scheduled = self._part(sequence, budget - self._config.max_draft)
                if sequence.scheduled <= 0:
                    continue
            else:
                sequence.scheduled = 1
            if not self._grow(sequence):
                continue
            if is_prompt:
                budget -= sequence.scheduled + self._config.max_draft
                coming.update(self._names_to_come(sequence))
            step.append(sequence)
        self._make_draft_room(step)
        return step

    def keep(self, sequence: Sequence) -> None:
        """Let others find the pages that the last step has filled; their tokens are committed."""
        if not self._config.prefix_cache:
            return
        full = sequence.computed // self.pages.page_size
        for index in range(sequence.named_pages, full):
            self.pages.name(sequence.pages[index], self._name(sequence, index))
        sequence.named_pages = full

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, finished or not, running or waiting, and its pages back."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.pages.give_back(sequence.pages)
            sequence.pages = []
        else:
            self.waiting.remove(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError if pages and sequences do not add up."""
        self.pages.check_integrity([sequence.pages for sequence in self.running])
        ids = [sequence.sequence_id for sequence in (*self.running, *self.waiting)]
        if ids != sorted(set(ids)):
            raise AssertionError("sequences are not in the order of their arrival")
        if any(sequence.pages or sequence.computed for sequence in self.waiting):
            raise AssertionError("a waiting sequence has pages")
        for sequence in self.running:
            self._check_pages(sequence)

    def _check_pages(self, sequence: Sequence) -> None:
        if len(sequence.pages) < self.pages.pages_for(sequence.computed):
            raise AssertionError("a sequence has fewer pages than tokens")
        names = PageNames(sequence.request.salt)
        full = sequence.computed // self.pages.page_size
        for index, page in enumerate(sequence.pages):
            name = self.pages.name_of(page)
            if name is None:
                continue
            # Also sees a shared page: that has a name, and whoever writes to it has not computed all of it.
            if index >= full or name != names.name(sequence.tokens, index, self.pages.page_size):
                raise AssertionError("a page holds other tokens than its name says")

    def _lacking(self, sequence: Sequence, tokens: int) -> int:
        """Pages that a sequence needs for that many tokens and does not have."""
        return max(0, self.pages.pages_for(tokens) - len(sequence.pages))

    def _name(self, sequence: Sequence, index: int) -> bytes:
        return sequence.page_names.name(sequence.tokens, index, self.pages.page_size)

    def _reusable(self, sequence: Sequence) -> int:
        """Leading pages that may come from the cache: tokens whose logits are wanted must run, at least the last."""
        if not self._config.prefix_cache or sequence.request.sampling.prompt_logprobs is not None:
            return 0
        return (len(sequence) - 1) // self.pages.page_size

    def _owned_prefix(self, sequence: Sequence) -> int:
        """Leading pages of a waiting sequence that others own, so that it can have them without taking any."""
        for index in range(self._reusable(sequence)):
            page = self.pages.find(self._name(sequence, index))
            if page is None or not self.pages.is_owned(page):
                return index
        return self._reusable(sequence)

    def _reuse(self, sequence: Sequence) -> None:
        """Let a prompt go on behind the pages that the cache has of what comes next."""
        size = self.pages.page_size
        if sequence.computed != len(sequence.pages) * size:
            return
        before = len(sequence.pages)
        for index in range(before, self._reusable(sequence)):
            page = self.pages.find(self._name(sequence, index))
            if page is None:
                break
            self.pages.share(page)
            sequence.pages.append(page)
        sequence.reuse((len(sequence.pages) - before) * size)
        sequence.named_pages = len(sequence.pages)

    def _is_coming(self, sequence: Sequence, coming: set[bytes]) -> bool:
        """Whether the next page of a prompt is computed in this step for another sequence."""
        if not coming or sequence.computed != len(sequence.pages) * self.pages.page_size:
            return False
        index = len(sequence.pages)
        return index < self._reusable(sequence) and self._name(sequence, index) in coming

    def _names_to_come(self, sequence: Sequence) -> list[bytes]:
        """Names of the pages that this step fills."""
        if not self._config.prefix_cache:
            return []
        full = (sequence.computed + sequence.scheduled) // self.pages.page_size
        return [self._name(sequence, index) for index in range(sequence.named_pages, full)]

    def _part(self, sequence: Sequence, most: int) -> int:
        """How much of a prompt to run, `most` tokens or less: all of it, or up to the end of a page."""
        end = min(len(sequence), sequence.computed + most)
        whole = end - end % self.pages.page_size
        return (whole if sequence.computed < whole and end < len(sequence) else end) - sequence.computed

    def _grow(self, sequence: Sequence) -> bool:
        """Take pages for what is scheduled; False if the sequence had to give up its own, being the newest."""
        needed = self._lacking(sequence, sequence.end)
        while needed > self.pages.free:
            newest = self.running[-1]
            self._preempt(newest)
            if newest is sequence:
                return False
        sequence.pages += self.pages.take(needed)
        return True

    def _make_draft_room(self, step: list[Sequence]) -> None:
        """Take pages for drafts, as far as that brings nobody else into need."""
        for sequence in step:
            wanted = self._lacking(sequence, min(sequence.end + self._config.max_draft, sequence.max_length))
            spare = max(0, self.pages.free - self._watermark)
            if sequence.completes_prompt:
                sequence.pages += self.pages.take(min(wanted, spare))
            sequence.draft_room = len(sequence.pages) * self.pages.page_size - sequence.end

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence)
        sequence.forget_computed()
        self.waiting.appendleft(sequence)
        self.preemptions += 1
