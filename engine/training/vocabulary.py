"""The byte-pair vocabulary of the shipped target, learned from its training text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"

WORDS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+"  # a word, with the one sign or space before it
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+"  # operators and brackets
    r"|\s*[\r\n]+"  # blank lines belong to the line end before them
    r"|\s+(?!\S)"  # indentation, less the space that its word takes
    r"|\s+"
)
"""Where tokens may not reach across; the pattern that GPT-4's vocabulary made common, fitted to code."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE vocabulary (Sennrich et al., 2016) with one special token, the end of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id of the special token. Raises ValueError for a vocabulary without it."""
    token = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise ValueError(f"the vocabulary has no {END_OF_TEXT}")
    return int(token)


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """All texts as one row of token ids, uint16 [N], each led by the end-of-text token."""
    end = end_of_text(tokenizer)
    rows: list[int] = []
    for text in texts:
        rows.append(end)
        rows.extend(tokenizer.encode(text, add_special_tokens=False).ids)
    rows.append(end)
    return np.asarray(rows, dtype=np.uint16)
