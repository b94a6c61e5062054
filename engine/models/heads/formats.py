"""Load draft heads that were published, and save heads in published formats.

A head is checked against the target's configuration and the headers of its own files before memory is allocated for
it, and needs no weights of the target until it is attached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.models.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from engine.models.config import ModelConfig
from engine.models.heads.eagle import EagleHead, eagle_files, read_eagle
from engine.models.heads.eagle3 import Eagle3Head, eagle3_files, read_eagle3
from engine.models.heads.head import DraftHead
from engine.models.heads.medusa import MedusaHeads, medusa_files, read_medusa
from engine.models.heads.mtp import MtpHead, mtp_files, read_mtp
from engine.models.heads.source import Blueprint, HeadFolder
from engine.models.loader import allocate_weights, shapes, write_tensors
from ssd.errors import UserError

Head = DraftHead | MedusaHeads
MEDUSA_WEIGHTS_FILE = "medusa_lm_head.safetensors"


class HeadKind(NamedTuple):
    """A kind of head with its published format."""

    network: type[nn.Module]
    read: Callable[[HeadFolder, ModelConfig], Blueprint[Any]]
    files: Callable[..., tuple[dict[str, Any], Mapping[str, Tensor]]]
    """Returns the configuration and the tensors of a head for a dtype."""


KINDS = {
    "mtp": HeadKind(MtpHead, read_mtp, mtp_files),
    "eagle": HeadKind(EagleHead, read_eagle, eagle_files),
    "eagle3": HeadKind(Eagle3Head, read_eagle3, eagle3_files),
    "medusa": HeadKind(MedusaHeads, read_medusa, medusa_files),
}
"""Kinds of heads by the name of the drafter. To add one, add a module like those of these kinds, and an
entry here, in `engine.drafters.registry.KINDS`, `DraftSource` and `engine.training.kinds.KINDS`."""


def check_head(
    kind: str, folder: Path, target: ModelConfig, *, target_folder: Path | None = None
) -> tuple[HeadFolder, Blueprint[Any]]:
    """Return the files of the head in `folder`, of a kind of `KINDS`, and the head before its weights are read.

    Reads only headers and the draft vocabulary, so that a wrong folder is refused before the target is loaded.
    target_folder: the target's own folder, which has no head other than an MTP layer. Raises UserError unless the head
    fits the target.
    """
    if kind not in KINDS:
        raise UserError(f"{kind!r} is not a kind of draft head; give one of {', '.join(KINDS)}")
    if kind != "mtp" and target_folder is not None and folder.exists() and folder.samefile(target_folder):
        raise UserError(f"{folder} is the target's own folder, not one of {kind} weights; give --draft-model another")
    source = HeadFolder(folder)
    blueprint = KINDS[kind].read(source, target)
    source.checkpoint.check(shapes(blueprint.views(blueprint.head)), is_redundant=blueprint.is_redundant)
    return source, blueprint


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
    source, blueprint = check_head(kind, folder, target, target_folder=target_folder)
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
    kind = next(kind for kind in KINDS.values() if type(head) is kind.network)
    fields, views = kind.files(head, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (view.to(dtype) if view.is_floating_point() else view).contiguous() for name, view in views.items()
    }
    file = MEDUSA_WEIGHTS_FILE if isinstance(head, MedusaHeads) else WEIGHTS_FILE
    write_tensors({name: tensor.clone() for name, tensor in tensors.items()}, folder / file)
    if base_model:
        fields["base_model_name_or_path"] = base_model
    (folder / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
