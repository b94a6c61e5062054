"""Decoding of a batch: in each forward pass, each row verifies a draft of its own.

Drafts are padded to the longest of the step. At each position of a draft, and after its last token, the target's token
is chosen as without drafts: the likeliest, or a sample. A row keeps these tokens up to and including the first that
differs from its draft. So drafts do not change the distribution of outputs: this is speculative sampling (Leviathan
et al. 2023) with drafts of probability 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafter_service.plugins.draft import common_length
from drafter_service.plugins.options import End, RequestOptions
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.step_clock import StepClock
from drafter_service.plugins.transformers.support import WHOLE_BATCH_PROCESSORS, end_tokens

MAX_HOLES = 0.125
"""Slots beyond the longest row, relative to its length, above which the cache is compacted. With 1000 tokens per row,
compacting takes a third of a step's time, and twice the slots take 1.7 times the time."""


@dataclass(slots=True)
class Row:
    """A sequence of the batch."""

    index: int
    """Its index in the batch."""
    request_id: int
    text: list[int]
    """Prompt and output, without padding."""
    padding: int
    """Number of tokens before the prompt."""
    position: int
    """Position of the last token."""

    @property
    def length(self) -> int:
        """Number of tokens, padding included."""
        return self.padding + len(self.text)


class BatchDecoder:
    """One call of `generate` with a batch."""

    def __init__(self, session: HostSession, model: Any, input_ids: Any, arguments: dict[str, Any]) -> None:
        """input_ids: int64 [B, P], left padded. arguments: those of the host's decoding methods, `with_limits_of`."""
        config = arguments["generation_config"]
        self.session, self._clock = session, StepClock(session)
        self._model, self._config = model, config
        self._processors = arguments["logits_processor"]
        self._needs_all_rows = any(type(each).__name__ in WHOLE_BATCH_PROCESSORS for each in self._processors)
        self._stops = Stops(arguments["stopping_criteria"], config.max_length)
        ends = self._stops.end_tokens
        self._pad = config.pad_token_id if config.pad_token_id is not None else ends[0] if ends else 0
        batch_size, width = input_ids.shape
        self._text = input_ids.new_full((batch_size, config.max_length), self._pad)
        """int64 [B, max_length]: prompts, outputs, and the drafts of the step."""
        self._text[:, :width] = input_ids
        # Its name until version 5.23.
        self._cache_name = "cache" if "cache" in arguments else "past_key_values"
        self._inputs = {name: arguments[name] for name in (self._cache_name, "use_cache")}
        self._has_logits_to_keep = "logits_to_keep" in arguments
        self._cache = RowCache(arguments[self._cache_name], batch_size)
        mask = arguments.get("attention_mask")
        self._ids = input_ids
        """int64 [B, T]: tokens of running rows that the model has not seen. All rows have the same number of them."""
        self._mask = input_ids.new_ones(input_ids.shape) if mask is None else mask.to(input_ids.dtype)
        self._positions = arguments["position_ids"].expand(batch_size, -1)

    def run(self, request_ids: Sequence[int], options: RequestOptions, extras: Sequence[dict[str, Any]]) -> Any:
        """Return the same as the host's decoding methods, without its cache.

        request_ids, extras: those of each row. options, extras: see `HostSession.start`.
        """
        rows = self._begin(request_ids, options, extras)
        try:
            running = rows
            while running:
                running = self._step(running)
        except BaseException:
            for row in rows:
                self.session.finish(row.request_id, end=End.CANCELLED)
            raise
        sequences = self._text[:, : max(row.length for row in rows)]
        if not self._config.return_dict_in_generate:
            return sequences
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=sequences)

    def _begin(
        self, request_ids: Sequence[int], options: RequestOptions, extras: Sequence[dict[str, Any]]
    ) -> list[Row]:
        """Return the rows, after starting a request of the session for each."""
        padding = (self._mask == 0).sum(dim=1).tolist()
        positions = self._positions[:, -1].tolist()
        rows = []
        for index, ids in enumerate(self._ids.tolist()):
            rows.append(Row(index, request_ids[index], ids[padding[index] :], padding[index], positions[index]))
            self.session.start(request_ids[index], rows[index].text, options, extras[index])
        return rows

    def _step(self, rows: list[Row]) -> list[Row]:
        """Run one forward pass; return the rows that are not finished."""
        drafts = self._draft(rows)
        logits = self._forward(rows, drafts)
        chosen = self._choose(logits, rows, drafts)
        width = self._ids.shape[1]
        kept, counts = [], []
        for at, (row, draft, tokens) in enumerate(zip(rows, drafts, chosen, strict=True)):
            before = row.length
            if not self._commit(row, tokens[: common_length(draft, tokens) + 1]):
                kept.append(at)
                # The last token has not been in the model.
                counts.append(width + row.length - before - 1)
        running = [rows[at] for at in kept]
        if self._stops.is_late(self._text):
            for row in running:
                self._finish(row)
            return []
        if running:
            self._cache.keep(kept, counts, max(len(row.text) for row in running) - 1)
            self._ids = self._ids.new_tensor([row.text[-1:] for row in running])
            self._mask = self._mask.new_ones(self._ids.shape)
            self._positions = self._positions.new_tensor([[row.position] for row in running])
        return running

    def _draft(self, rows: list[Row]) -> list[list[int]]:
        """Return a draft for each row, and write it after the row's text."""
        self._clock.end()
        width = self._ids.shape[1]
        texts = [(row.request_id, row.text) for row in rows]
        drafts = self.session.draft(texts, prompt_tokens=len(rows) * (width - 1))
        self.session.schedule({row.request_id: draft for row, draft in zip(rows, drafts, strict=True)})
        for row, draft in zip(rows, drafts, strict=True):
            self._write(row, draft)
        self._clock.begin(len(rows) * (width + max(map(len, drafts))), len(rows))
        return drafts

    def _forward(self, rows: list[Row], drafts: list[list[int]]) -> Any:
        """Return the logits after the text and after each draft token, float [B, 1 + longest draft, vocabulary]."""
        import torch

        longest = max(map(len, drafts))
        lengths = [(len(draft), longest - len(draft)) for draft in drafts]
        ids = self._ids.new_tensor([draft + [0] * (longest - len(draft)) for draft in drafts])
        mask = self._mask.new_tensor([[1] * real + [0] * padding for real, padding in lengths])
        positions = self._positions.new_tensor([[row.position + 1 + at for at in range(longest)] for row in rows])
        inputs = self._model.prepare_inputs_for_generation(
            torch.cat((self._ids, ids), dim=1),
            attention_mask=self._cache.extend(torch.cat((self._mask, mask), dim=1)),
            position_ids=torch.cat((self._positions, positions), dim=1),
            **({"logits_to_keep": 1 + longest} if self._has_logits_to_keep else {}),
            **self._inputs,
        )
        return self._model(**inputs, return_dict=True).logits[:, -1 - longest :]

    def _choose(self, logits: Any, rows: list[Row], drafts: list[list[int]]) -> list[list[int]]:
        """Return the target's tokens at the places of each row's draft and after it."""
        import torch

        places = [(at, offset) for at, draft in enumerate(drafts) for offset in range(len(draft) + 1)]
        at, offsets = zip(*places, strict=True)
        scores = logits[list(at), list(offsets)].to(device=self._ids.device, dtype=torch.float32)
        if self._processors:
            scores = self._process(scores, [(rows[at].index, rows[at].length + offset) for at, offset in places])
        tokens = scores.softmax(dim=-1).multinomial(1)[:, 0] if self._config.do_sample else scores.argmax(dim=-1)
        remaining = iter(tokens.tolist())
        return [[next(remaining) for _ in range(len(draft) + 1)] for draft in drafts]

    def _process(self, scores: Any, places: Sequence[tuple[int, int]]) -> Any:
        """Return scores after the host's logits processors.

        scores: float32 [N, vocabulary]. places: index of the row in the batch, and number of tokens before, for each.
        """
        processed = scores.clone()
        by_length: dict[int, list[int]] = {}
        for place, (_, length) in enumerate(places):
            by_length.setdefault(length, []).append(place)
        for length, group in by_length.items():
            rows = [places[place][0] for place in group]
            if self._needs_all_rows:
                whole = scores.new_zeros(len(self._text), scores.shape[1])
                whole[rows] = scores[group]
                processed[group] = self._processors(self._text[:, :length], whole)[rows]
            else:
                processed[group] = self._processors(self._text[rows, :length], scores[group])
        return processed

    def _commit(self, row: Row, tokens: list[int]) -> bool:
        """Add tokens to a row, up to the one at which it ends; return whether it ends."""
        self._write(row, tokens)
        tokens, is_end = self._stops.cut(self._text[row.index, None], row.length, tokens)
        row.text += tokens
        row.position += len(tokens)
        if is_end:
            self._finish(row)
        return is_end

    def _write(self, row: Row, tokens: list[int]) -> None:
        """Write tokens after the text of a row."""
        self._text[row.index, row.length : row.length + len(tokens)] = self._text.new_tensor(tokens)

    def _finish(self, row: Row) -> None:
        self._text[row.index, row.length :] = self._pad
        self.session.finish(row.request_id, row.text)


class RowCache:
    """A rectangular KV cache. A mask hides the slots of rejected tokens and of padding.

    The slots of a row are in the order of its text, so the host's causal mask over slots is right. Positions cannot be
    derived from slots; each step must give them.
    """

    def __init__(self, cache: Any, rows: int) -> None:
        """cache: the host's `DynamicCache`, empty. rows: number of rows of the batch."""
        self._cache = cache
        self._rows = rows
        self._mask: Any = None
        """int64 [B, S]: 1 where a slot has a token of its row."""
        self._added = 0
        """Number of slots of the last step."""

    def extend(self, mask: Any) -> Any:
        """Add the slots of a step. mask: int64 [B, T], 1 where they have a token. Return the mask of all slots."""
        import torch

        self._added = mask.shape[1]
        self._mask = mask if self._mask is None else torch.cat((self._mask, mask), dim=1)
        return self._mask

    def keep(self, rows: Sequence[int], counts: Sequence[int], longest: int) -> None:
        """Keep some rows, and for each the first slots of the last step.

        rows: indices of rows, ascending. counts: number of slots of the last step to keep, for each of these rows.
        longest: number of tokens of the longest of them.
        """
        if len(rows) < self._rows:
            index = self._mask.new_tensor(rows)
            self._cache.batch_select_indices(index)
            self._mask, self._rows = self._mask[index], len(rows)
        unused = self._added - max(counts)
        if unused:
            self._cache.crop(-unused)
            self._mask = self._mask[:, :-unused]
        slots = self._mask.shape[1]
        for row, count in enumerate(counts):
            self._mask[row, slots - max(counts) + count :] = 0
        if slots > (1 + MAX_HOLES) * longest:
            self._compact(longest)

    def _compact(self, slots: int) -> None:
        """Reduce the cache to a number of slots, in which the tokens of each row are at the end."""
        order = self._mask.argsort(dim=1, stable=True)[:, -slots:]
        self._mask = self._mask.gather(1, order)
        rows = order.new_tensor(range(self._rows))[:, None]
        for layer in self._cache.layers:
            layer.keys = layer.keys.transpose(1, 2)[rows, order].transpose(1, 2)
            layer.values = layer.values.transpose(1, 2)[rows, order].transpose(1, 2)


class Stops:
    """The stopping criteria of a batch."""

    def __init__(self, criteria: Sequence[Any], max_length: int) -> None:
        """criteria: those of `ROW_CRITERIA`. max_length: maximum length of a row, prompt and padding included."""
        self.end_tokens = end_tokens(criteria)
        self._max_length = max_length
        self._strings = [each for each in criteria if type(each).__name__ == "StopStringCriteria"]
        self._times = [each for each in criteria if type(each).__name__ == "MaxTimeCriteria"]

    def cut(self, row: Any, length: int, tokens: list[int]) -> tuple[list[int], bool]:
        """Return the tokens up to the first at which the row ends, and whether it ends.

        row: int64 [1, N], of which `length` tokens are followed by `tokens`.
        """
        for count, token in enumerate(tokens, 1):
            end = length + count
            is_last = token in self.end_tokens or end >= self._max_length
            if is_last or any(each(row[:, :end], None).item() for each in self._strings):
                return tokens[:count], True
        return tokens, False

    def is_late(self, rows: Any) -> bool:
        """Return whether the time for all rows is over; rows: int64 [B, N]."""
        return any(each(rows, None)[0].item() for each in self._times)
