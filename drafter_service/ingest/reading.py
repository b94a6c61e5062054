"""What a load wants of its files, and what it could not have: from a record or a text to the items of a chunk."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from drafter_service.ingest.chunk import Item, Part
from drafter_service.ingest.faults import NO_TOKENIZER, Faults, RecordError
from drafter_service.ingest.files import File
from drafter_service.ingest.messages import Chat, Reply
from drafter_service.ingest.records import Found, find_outputs
from drafter_service.ingest.vocabulary import Vocabulary
from ssd.config import DrafterConfig

BLOCK_BYTES = 1 << 20
LEAD = DrafterConfig.learned_prompt_tokens
LEAD_CHARS = 32 * LEAD
"""Enough of a prompt's end for its last `LEAD` tokens; prompts are long, and tokenizing them whole takes longest."""


@dataclass(frozen=True)
class Reading:
    """How all files of a load are read."""

    vocabulary: Vocabulary | None = None
    fields: tuple[str, ...] = ()
    """Where to look in a record, the output last; empty: in the known places."""
    whole_prompts: bool = False
    """Whether prompts are learned whole, and not only their end."""
    block_bytes: int = BLOCK_BYTES
    """About how much of a file is read, and handed on, at once."""
    faults: Faults = field(default_factory=Faults)

    def items_of(self, record: object, file: File, number: int) -> list[Item]:
        """The documents of record `number` of a file; what cannot be had is counted."""
        place = f"{file.name}:{number}"
        try:
            found = find_outputs(record, self.fields)
        except RecordError as problem:
            self.faults.note(str(problem), place)
            return []
        items = []
        for index, output in enumerate(found):
            name = output.request or place
            try:
                items.append(self._item(output, f"{name}/{index}" if index else name))
            except RecordError as problem:
                self.faults.note(str(problem), place)
        return items

    def text_item(self, text: str, place: str) -> Item | None:
        """A text as a document of its own."""
        if self.vocabulary is None:
            self.faults.note(NO_TOKENIZER, place)
            return None
        return Item(place, None, text)

    def lead_of(self, prompt: np.ndarray) -> np.ndarray:
        """What is remembered of a prompt's tokens; a copy, so that nothing holds the rest of them."""
        return prompt if self.whole_prompts else prompt[-LEAD:].copy()

    def _item(self, found: Found, name: str) -> Item:
        output: Part
        if isinstance(found.output, Reply):
            chat = found.prompt if isinstance(found.prompt, Chat) else None
            output = self._known().chat.reply_text(chat, found.output.message)
        else:
            output = found.output
        if isinstance(output, str):
            self._known()
        return Item(name, self._prompt(found.prompt), output)

    def _prompt(self, prompt: Part | Chat | None) -> Part | None:
        if isinstance(prompt, np.ndarray):
            return self.lead_of(prompt)
        if prompt is None or self.vocabulary is None:
            return None
        text = self.vocabulary.chat.prompt_text(prompt) if isinstance(prompt, Chat) else prompt
        return text if self.whole_prompts else text[-LEAD_CHARS:]

    def _known(self) -> Vocabulary:
        if self.vocabulary is None:
            raise RecordError(NO_TOKENIZER)
        return self.vocabulary
