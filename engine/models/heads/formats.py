"""Load draft heads that were published, and save heads in published formats.

A head is checked against the target's configuration and the headers of its own files before memory is allocated for
it, and needs no weights of the target until it is attached.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.models.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from engine.models.config import ModelConfig
from engine.models.heads.eagle import EagleHead
from engine.models.heads.eagle3 import Eagle3Head
from engine.models.heads.eagle3_format import eagle3_files, read_eagle3
from engine.models.heads.eagle_format import eagle_files, read_eagle
from engine.models.heads.head import DraftHead
from engine.models.heads.medusa import MedusaHeads
from engine.models.heads.medusa_format import medusa_files, read_medusa
from engine.models.heads.mtp import MtpHead
from engine.models.heads.mtp_format import mtp_files, read_mtp
from engine.models.heads.source import Blueprint, HeadFolder
from engine.models.loader import allocate_weights, shapes, write_tensors
from ssd.errors import UserError

Head = DraftHead | MedusaHeads

READERS: dict[str, Callable[[HeadFolder, ModelConfig], Blueprint[Any]]] = {
    "mtp": read_mtp,
    "eagle": read_eagle,
    "eagle3": read_eagle3,
    "medusa": read_medusa,
}
"""Readers of published formats by the kind of drafter."""
MEDUSA_WEIGHTS_FILE = "medusa_lm_head.safetensors"


def check_head(kind: str, folder: Path, target: ModelConfig, *, target_folder: Path | None = None) -> None:
    """Raise UserError unless `folder` has a head of a kind of `READERS` that fits the target.

    Reads only headers and the draft vocabulary, so that a wrong folder is refused before the target is loaded.
    target_folder: the target's own folder, which has no head other than an MTP layer.
    """
    _check(kind, folder, target, target_folder)


def load_head(
    kind: str,
    folder: Path,
    target: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    target_folder: Path | None = None,
) -> Head:
    """Return the head in `folder`, ready to be attached to its target. Raises UserError like `check_head`.

    The weights must be finite in `dtype`.
    """
    source, blueprint = _check(kind, folder, target, target_folder)
    head: DraftHead | MedusaHeads = blueprint.head.to(dtype).requires_grad_(False)
    allocate_weights(head, device)
    if isinstance(head, DraftHead):
        config = head.config  # `to` converted the frequencies too
        head.frequencies = config.rope.frequencies(config.head_dim).repeat(2).to(device)
    source.checkpoint.copy_into(blueprint.views(head))
    blueprint.finish(head)
    return head.eval()


def save_head(head: Head, folder: Path, *, dtype: torch.dtype = torch.bfloat16, base_model: str = "") -> None:
    """Write a head in a format that `load_head`, vLLM and SGLang read; an MTP head must be attached to its target.

    EAGLE heads and Medusa heads are written in their authors' formats, MTP layers in MiMo's. base_model: name of the
    target, for the reader of config.json.
    """
    writers: dict[type[nn.Module], Callable[..., Any]] = {
        MtpHead: mtp_files,
        EagleHead: eagle_files,
        Eagle3Head: eagle3_files,
        MedusaHeads: medusa_files,
    }
    fields, views = writers[type(head)](head, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (view.to(dtype) if view.is_floating_point() else view).contiguous() for name, view in views.items()
    }
    file = MEDUSA_WEIGHTS_FILE if isinstance(head, MedusaHeads) else WEIGHTS_FILE
    write_tensors({name: tensor.clone() for name, tensor in tensors.items()}, folder / file)
    if base_model:
        fields["base_model_name_or_path"] = base_model
    (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _check(
    kind: str, folder: Path, target: ModelConfig, target_folder: Path | None
) -> tuple[HeadFolder, Blueprint[Any]]:
    if kind not in READERS:
        raise UserError(f"{kind!r} is not a kind of draft head; give one of {', '.join(READERS)}")
    if kind != "mtp" and target_folder is not None and folder.exists() and folder.samefile(target_folder):
        raise UserError(f"{folder} is the target's own folder, not one of {kind} weights; give --draft-model another")
    source = HeadFolder(folder)
    blueprint = READERS[kind](source, target)
    source.checkpoint.check(shapes(blueprint.views(blueprint.head)), is_redundant=blueprint.is_redundant)
    return source, blueprint
