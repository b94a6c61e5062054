"""Read metadata, tensors and the tokenizer of a GGUF file, the format of llama.cpp, with the library gguf.

A GGUF file takes the place of a model folder: it holds what `tokenizer_config.json` and other files hold elsewhere. Its
tokenizer is byte-level BPE, or BPE over scored pieces as SentencePiece has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd.errors import UserError, missing_extra

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MAGIC = b"GGUF"
ROLES = ("bos", "eos", "unk", "pad", "eot", "eom")
"""Special tokens as chat templates name them, without "_token"."""
KEYS = {"unk": "unknown", "pad": "padding"}
"""Names of roles in the metadata, where they differ."""


@dataclass(frozen=True)
class GgufFile:
    """Content of a GGUF file. The weights are mapped, not read."""

    path: Path
    metadata: Mapping[str, Any]
    """Values by keys such as "llama.block_count"."""
    tensors: Mapping[str, Any]
    """`gguf.ReaderTensor` by name. Their `data` is [rows, bytes of a row] for quantized weights."""

    def field(self, key: str) -> Any:
        """Return a value of the metadata. Raises UserError if the file does not have it."""
        if key not in self.metadata:
            raise UserError(f"{self.path} has no {key}; convert the model to GGUF again, or give its folder")
        return self.metadata[key]

    def token_id(self, role: str) -> int | None:
        """Return the id of a special token of `ROLES`; None if the model has none."""
        token = self.metadata.get(f"tokenizer.ggml.{KEYS.get(role, role)}_token_id")
        return None if token is None else int(token)

    def tokens(self) -> list[str]:
        """Return the texts of the vocabulary by token id; an empty list if the file has no vocabulary."""
        return list(self.metadata.get("tokenizer.ggml.tokens", []))


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, whatever its name."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_gguf(path: Path) -> GgufFile:
    """Return the content of a GGUF file; a file that did not change is read once.

    Raises UserError for a damaged file, for one part of several, and if the library gguf is missing.
    """
    state = path.stat()
    return _read(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _read(path: Path, _modified_ns: int, size: int) -> GgufFile:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise missing_extra(f"{path} is a GGUF file, which needs the library gguf", "gguf") from None
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception:  # The library passes on exceptions of numpy, which do not say what is wrong with the file.
        raise UserError(
            f"{path} is damaged or cut short, or of a version of GGUF that the library gguf does not read: its "
            f"{size:,} bytes are not what its header describes; compare the size with the original's, and download or "
            "copy it again"
        ) from None
    if int(metadata.get("split.count", 1)) > 1:
        raise UserError(f"{path} is one of {metadata['split.count']} parts; join them with llama-gguf-split --merge")
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def gguf_tokenizer_config(path: Path) -> dict[str, Any]:
    """Return the fields that `tokenizer_config.json` has: special tokens and chat templates. Raises UserError."""
    file = open_gguf(path)
    tokens = file.tokens()
    ids = {role: file.token_id(role) for role in ROLES}
    config: dict[str, Any] = {
        f"{role}_token": tokens[token] for role, token in ids.items() if token is not None and token < len(tokens)
    }
    prefix = "tokenizer.chat_template"
    config["chat_template"] = [
        {"name": key.removeprefix(prefix).removeprefix(".") or "default", "template": template}
        for key, template in file.metadata.items()
        if key == prefix or key.startswith(f"{prefix}.")
    ]
    return config


NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Types of tokens, of `gguf.TokenType`."""
SPACE = "▁"
"""The character that stands for a space in SentencePiece vocabularies."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ONE_DIGIT = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST
THREE_DIGITS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CAPITALS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Splitting:
    """How a tokenizer splits text into words, within which tokens are merged."""

    pattern: str | None = None
    """A regular expression of words; None: that of GPT-2."""
    has_single_digits: bool = False
    """Whether each digit is split off first."""
    prefers_whole_words: bool = False
    """Whether a word that is a token is that token, whatever the merges."""
    has_bos: bool = False
    """Whether prompts begin with a special token, unless the metadata says otherwise."""
    is_composed: bool = False
    """Whether text is normalized to NFC."""


DIGITS = Splitting(has_single_digits=True)
LLAMA3 = Splitting(THREE_DIGITS, prefers_whole_words=True, has_bos=True)
SPLITTINGS = {
    "gpt-2": Splitting(),
    "olmo": Splitting(),
    **dict.fromkeys(("smollm", "starcoder", "refact", "minerva-7b"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), LLAMA3),
    "smaug-bpe": Splitting(THREE_DIGITS),
    "qwen2": Splitting(ONE_DIGIT, is_composed=True),
    "deepseek-r1-qwen": Splitting(ONE_DIGIT),
    "tekken": Splitting(CAPITALS, prefers_whole_words=True, has_bos=True),
}
"""Supported values of `tokenizer.ggml.pre`."""


def gguf_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a GGUF file. Raises UserError for an unknown one, and others for a damaged one."""
    file = open_gguf(path)
    kind = file.field("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UserError(
            f"{path} has a tokenizer of the kind {kind!r}; only BPE (gpt2) and SentencePiece's BPE (llama) are read, "
            "so give the model's folder"
        )
    tokenizer, has_bos = _byte_level(file) if kind == "gpt2" else _scored_pieces(file)
    _add_special_tokens(tokenizer, file)
    if file.metadata.get("tokenizer.ggml.add_bos_token", has_bos):
        _begin_with_bos(tokenizer, file)
    return tokenizer


def _byte_level(file: GgufFile) -> tuple[Tokenizer, bool]:
    """Return a byte-level BPE tokenizer, and whether its prompts begin with a special token by default."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = file.field("tokenizer.ggml.pre")
    if name not in SPLITTINGS:
        raise UserError(
            f"{file.path} names the pre-tokenizer {name!r}, which is not read; only {', '.join(SPLITTINGS)} are, so "
            "give the model's folder"
        )
    splitting = SPLITTINGS[name]
    merges = [tuple(merge.split(" ")) for merge in file.field("tokenizer.ggml.merges")]
    model = models.BPE(_vocabulary(file), merges, ignore_merges=splitting.prefers_whole_words)
    tokenizer = Tokenizer(model)
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.has_single_digits else []
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if splitting.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.has_bos


def _scored_pieces(file: GgufFile) -> tuple[Tokenizer, bool]:
    """Return a BPE tokenizer that merges the piece with the highest score first, and True as in `_byte_level`."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, vocabulary = file.tokens(), _vocabulary(file)
    scores, types = (file.field(f"tokenizer.ggml.{name}") for name in ("scores", "token_type"))
    pieces = [token for token, kind in enumerate(types) if kind in (NORMAL, USER_DEFINED)]
    merges = []
    for token in sorted(pieces, key=lambda each: -scores[each]):
        text = tokens[token]
        halves = [(text[:at], text[at:]) for at in range(1, len(text))]
        merges += [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
    unknown = file.token_id("unk")
    unknown_text = None if unknown is None else tokens[unknown]
    model = models.BPE(vocabulary, merges, unk_token=unknown_text, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    has_prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix: list[Any] = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _vocabulary(file: GgufFile) -> dict[str, int]:
    return {text: token for token, text in enumerate(file.field("tokenizer.ggml.tokens"))}


def _add_special_tokens(tokenizer: Tokenizer, file: GgufFile) -> None:
    """Let the tokenizer find tokens of the types CONTROL and USER_DEFINED in texts; only the former are special."""
    from tokenizers import AddedToken

    kinds = zip(file.tokens(), file.field("tokenizer.ggml.token_type"), strict=True)
    tokenizer.add_tokens(
        [
            AddedToken(text, special=kind == CONTROL, normalized=False)
            for text, kind in kinds
            if kind in (CONTROL, USER_DEFINED)
        ]
    )


def _begin_with_bos(tokenizer: Tokenizer, file: GgufFile) -> None:
    from tokenizers import processors

    token = file.token_id("bos")
    if token is not None:
        text = file.tokens()[token]
        tokenizer.post_processor = processors.TemplateProcessing(single=[text, "$A"], special_tokens=[(text, token)])
