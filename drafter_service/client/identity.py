"""Identity of the served model, from the folders that the engine loads, and name of the engine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafter_service.client.gguf import is_gguf, open_gguf
from drafter_service.client.tokenizer import TOKENIZER_FILE
from drafter_service.observability.facts import ModelIdentity
from ssd.errors import UserError

ADAPTER_FILE = "adapter_model.safetensors"
SHAPE = (
    "vocab_size",
    *("hidden_size", "n_embd", "d_model", "dim"),
    *("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    *("num_attention_heads", "n_head", "num_heads", "n_heads"),
    *("intermediate_size", "n_inner", "ffn_dim", "d_ff", "moe_intermediate_size"),
    *("num_experts", "num_local_experts", "n_routed_experts"),
)
"""Fields of config.json that decide which model it is, by the names that families give them."""
GGUF_SIZES = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "expert_count")
"""The same in GGUF, without the architecture before them."""
MAX_KIND = 64
"""Maximum length of the type of a model in its configuration's fingerprint, in characters."""
MAX_HOST_NAME = 100
"""Number of characters of the machine's name that `process_name` keeps."""


def process_name() -> str:
    """Return a name of this process, the default name of its engine: machine and process id, such as "node-3:4711"."""
    machine = re.sub(r"[^A-Za-z0-9_.-]+", "-", socket.gethostname())[:MAX_HOST_NAME]
    return f"{machine}:{os.getpid()}"


def model_identity(folder: str | Path, *, adapter: str | Path | None = None) -> ModelIdentity:
    """Return the identity of the model in a Hugging Face folder or GGUF file, with a LoRA adapter's folder if any.

    Its name is that of the folder, or of the hub's repository for a folder in the hub's cache, or of the GGUF file; it
    is for display. A GGUF file has the same identity here and in llama.cpp. Raises UserError if a file that is needed
    cannot be read.
    """
    folder = Path(folder)
    adapter_fingerprint = "" if adapter is None else fingerprint(Path(adapter) / ADAPTER_FILE)
    if is_gguf(folder):
        file = open_gguf(folder)
        vocabulary = vocabulary_fingerprint(text.encode() for text in file.tokens())
        return gguf_identity(folder.stem, vocabulary, len(file.tokens()), file.metadata, adapter_fingerprint)
    config = _text_config(folder / "config.json")
    return replace(
        tokenizer_identity(folder),
        name=_name(folder.resolve()),
        adapter=adapter_fingerprint,
        vocab_size=config["vocab_size"],
        configuration=_configuration(str(config.get("model_type") or "model"), config),
    )


def tokenizer_identity(path: Path) -> ModelIdentity:
    """Return what a folder, or a GGUF file, says about its tokenizer alone. Raises UserError."""
    tokenizer = fingerprint(path)
    return ModelIdentity(
        tokenizer=tokenizer, vocabulary=tokenizer if is_gguf(path) else _vocabulary(path / TOKENIZER_FILE)
    )


def gguf_identity(
    name: str, vocabulary: str, vocab_size: int, metadata: Mapping[str, Any], adapter: str = ""
) -> ModelIdentity:
    """Return the identity of the model in a GGUF file. metadata: values, or their texts, by keys of the format.

    All quantizations of a model have the same one, apart from the name.
    """
    kind = str(metadata.get("general.architecture") or "model")
    sizes = {key: metadata.get(f"{kind}.{key}") for key in GGUF_SIZES}
    # llama.cpp gives numbers as texts, and arrays of numbers in another form than the library gguf.
    shape = {key: int(value) for key, value in sizes.items() if value is not None and str(value).isdecimal()}
    configuration = _configuration(kind, {**shape, "vocab_size": vocab_size}) if vocabulary else ""
    return ModelIdentity(name, vocabulary, adapter, vocab_size, vocabulary, configuration)


def _configuration(kind: str, config: Mapping[str, Any]) -> str:
    """Return the type of a model, and a fingerprint of what decides which model it is: its shape.

    Other fields are incidental, or depend on the version of transformers that wrote the file: names, dtypes, lengths of
    the context, quantization. Fine-tuned weights have the configuration of the base model and share its corpus, which
    is harmless, because drafts are verified.
    """
    shape = {key: config[key] for key in (*SHAPE, *GGUF_SIZES) if isinstance(config.get(key), int)}
    return f"{kind[:MAX_KIND]}:{hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:32]}"


def _vocabulary(path: Path) -> str:
    """Return the fingerprint of the vocabulary of a tokenizer.json, whatever version of a library wrote the file.

    It is that of the file if that has no vocabulary that can be read.
    """
    try:
        content = json.loads(path.read_bytes())
        vocab = content["model"]["vocab"]
        # A Unigram model has pairs of text and score, others a dictionary of ids.
        pairs = (
            enumerate(text for text, _ in vocab) if isinstance(vocab, list) else ((vocab[text], text) for text in vocab)
        )
        texts = dict(pairs) | {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
        lines = (f"{token} {texts[token]}" for token in sorted(texts))
        return vocabulary_fingerprint(line.encode(errors="surrogatepass") for line in lines)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return fingerprint(path)


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file, in hex; for a folder that of its tokenizer.json, for a GGUF file of its vocabulary.

    Raises UserError.
    """
    if is_gguf(path):
        return vocabulary_fingerprint(text.encode() for text in open_gguf(path).tokens())
    file = path
    try:
        if path.is_dir():
            file = path / TOKENIZER_FILE
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as problem:
        raise UserError(f"cannot read {file}: {problem.strerror}") from None


def vocabulary_fingerprint(tokens: Iterable[bytes]) -> str:
    """Return the SHA-256, in hex, of the texts of a vocabulary by token id; "" without tokens."""
    content = b"".join(b"%d:%b" % (len(token), token) for token in tokens)
    return hashlib.sha256(content).hexdigest() if content else ""


def _name(folder: Path) -> str:
    """Return the name of a model folder; the hub's cache names folders models--OWNER--NAME/snapshots/REVISION."""
    snapshots = folder.parent
    if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
        return snapshots.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name


def _text_config(path: Path) -> dict[str, Any]:
    """Return the configuration of the text model, with its integer `vocab_size`. Raises UserError."""
    if not path.parent.is_dir():
        raise UserError(f"there is no model folder {path.parent}; give a Hugging Face folder, or a GGUF file")
    try:
        config = json.loads(path.read_text())
        # Multimodal models have a section for the text model.
        config = config if "vocab_size" in config else {"model_type": config.get("model_type"), **config["text_config"]}
        return {**config, "vocab_size": int(config["vocab_size"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} does not contain the model's vocab_size; download or copy it again") from None
