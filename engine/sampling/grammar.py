"""Grammars that outputs must match, by the library llguidance (optional, imported on first use).

A `GrammarState` is the state of the grammar after the committed tokens of one output. Drafts are followed with copies
of it; a copy takes 2 us. Does not import PyTorch, because the HTTP process uses `Grammar`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ssd.errors import UserError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from engine.models.tokenizer import Tokenizer
    from engine.speculation.draft_tree import DraftTree

JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON is written on one line, as by Python's `json.dumps`. With free whitespace almost nothing would be forced, and a
weak model could produce spaces without end. A schema may choose otherwise in its field `x-guidance`."""
MAX_COMPILED = 64
"""Number of compiled grammars to keep, because most requests use one of a few schemas."""
MAX_TEXT = 1 << 16
"""Largest number of characters of a grammar. Compiling delays running requests: 64,605 characters took 50 ms."""
MAX_MESSAGE = 300
"""Maximum number of characters of the library's message in an error."""


@dataclass(frozen=True)
class Grammar:
    """What an output must match."""

    kind: Literal["json_schema", "json_object", "regex", "choice"]
    text: str = ""
    """The JSON schema, the regular expression, or the list of choices as JSON; empty for `json_object`."""


class GrammarState:
    """The state of a grammar after some tokens."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, vocab_size: int, *, has_ended: bool = False) -> None:
        """vocab_size: number of token ids of the model. has_ended: whether the last token was an end token."""
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._has_ended = has_ended

    def copy(self) -> GrammarState:
        """Return an independent state."""
        return GrammarState(self._matcher.deep_copy(), self._tokenizer, self._vocab_size, has_ended=self._has_ended)

    def accept(self, token: int) -> bool:
        """Advance by a token; return whether the grammar allows it. Otherwise the state does not change."""
        if self._has_ended:
            return False
        if token in self._tokenizer.eos_tokens:
            # The library does not accept end tokens where nothing else may follow.
            self._has_ended = self._matcher.is_accepting()
            return self._has_ended
        return self._matcher.try_consume_tokens([token]) == 1

    def forced(self) -> list[int]:
        """Return the tokens that must follow, with the end token if nothing else may follow them."""
        if self._has_ended:
            return []
        forced = self._matcher.compute_ff_tokens()
        ends = self._tokenizer.eos_tokens
        after = self.copy()
        after._matcher.try_consume_tokens(forced)
        # The library does not count end tokens among the forced ones.
        if len(ends) == 1 and after._matcher.is_accepting() and after.allowed().sum() == 1:
            forced += ends
        return forced

    def allowed(self) -> np.ndarray:
        """Return which tokens may follow, bool [V]. End tokens may where the output can be complete."""
        mask = np.zeros(-(-self._tokenizer.vocab_size // 32), np.uint32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocab_size].astype(np.bool_)

    def allowed_along(self, draft: np.ndarray, tree: DraftTree | None, needed: np.ndarray) -> np.ndarray:
        """Return which tokens may follow the committed tokens and each token of a draft, bool [rows, V].

        draft: uint32 [k]. tree: its shape, None for a path. needed: bool [k + 1], the rows to return. After a forbidden
        draft token everything is allowed, because the row is not used.
        """
        parents = range(-1, len(draft) - 1) if tree is None else tree.parents.tolist()
        states: list[GrammarState | None] = [self]
        for token, parent in zip(draft.tolist(), parents, strict=True):
            before = states[1 + parent]
            after = None if before is None else before.copy()
            states.append(after if after is not None and after.accept(token) else None)
        rows = np.ones((int(needed.sum()), self._vocab_size), np.bool_)
        for row, index in enumerate(np.flatnonzero(needed).tolist()):
            if (state := states[index]) is not None:
                rows[row] = state.allowed()
        return rows


class GrammarCompiler:
    """Compiles grammars for the vocabulary of one model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: tuple[int, ...]) -> None:
        """vocab_size: number of token ids of the model. end_tokens: ids of tokens that end an output."""
        self._hub_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = list(end_tokens)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, GrammarState] = OrderedDict()
        """The most recently used last."""

    def start(self, grammar: Grammar) -> GrammarState:
        """Return the state before the first token. Raises UserError for a grammar that cannot be used."""
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar].copy()

    def _compile(self, grammar: Grammar) -> GrammarState:
        if len(grammar.text) > MAX_TEXT:
            raise UserError(
                f"{grammar.kind}: it has {len(grammar.text):,} characters; at most {MAX_TEXT:,} are possible"
            )
        try:
            import llguidance
        except ImportError:
            raise UserError(
                f"{grammar.kind} needs the library llguidance; install it on the server with "
                "pip install 'ssd-drafter[grammar]'"
            ) from None
        if not self._end_tokens:
            raise UserError(f"{grammar.kind} needs a model with an end token")
        if self._tokenizer is None:
            # The vocabularies of models are often padded, so theirs is the larger one.
            size = max(self._vocab_size, max(self._hub_tokenizer.tokens()) + 1)
            self._tokenizer = llguidance.LLTokenizer(self._hub_tokenizer.to_json(), size, self._end_tokens)
        try:
            matcher = llguidance.LLMatcher(self._tokenizer, _definition(grammar), log_level=0)
        except ValueError as problem:
            raise _refused(grammar, str(problem)) from None
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        return GrammarState(matcher, self._tokenizer, self._vocab_size)


def choice_grammar(choices: list[str]) -> Grammar:
    """Return the grammar of outputs that are one of the given strings."""
    return Grammar("choice", json.dumps(choices, ensure_ascii=False))


def _definition(grammar: Grammar) -> str:
    """Return the grammar in llguidance's own format. Raises ValueError for a schema that is not a JSON object."""
    from llguidance import LLMatcher, grammar_from

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        return grammar_from("choice", grammar.text)
    schema = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
    return LLMatcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)


def _refused(grammar: Grammar, reason: str) -> UserError:
    line = " ".join(reason.split())
    return UserError(f"{grammar.kind}: it cannot be used: {line[:MAX_MESSAGE]}")
