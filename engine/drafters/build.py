"""Build the drafters that run a network, from folders of weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.drafters.autoregressive import AutoregressiveDrafter
from engine.drafters.compiled.network import compile_head
from engine.drafters.draft_model import ModelHead
from engine.drafters.medusa import MedusaDrafter
from engine.drafters.sources import DraftSource
from engine.models.heads.formats import Head, check_head, load_head
from engine.models.heads.medusa import MedusaHeads
from engine.models.loader import check_draft_model, load_config, load_draft_model, load_model
from engine.models.packed import pack, quantize_int8
from engine.models.shipped import SHIPPED_HEADS, SHIPPED_MODEL
from ssd.errors import UserError

if TYPE_CHECKING:
    from engine.drafters.base import Drafter, TargetInfo
    from engine.drafters.options import Resources


def build_model_drafter(kind: str, depth: int, resources: Resources, *, has_trees: bool) -> Drafter:
    """Return a drafter that runs a network.

    kind: one of the kinds with `DrafterKind.runs_model`. depth: largest number of draft positions. has_trees: whether
    drafts may have branches. Raises ValueError without a target, UserError for a folder of weights that cannot be used.
    """
    target = resources.target
    if target is None or target.folder is None:
        raise ValueError("it needs the target's model and folder")
    head = _load(kind, target, resources.draft_models.get(kind))
    source = DraftSource[kind.replace("-", "_").upper()]
    # Rejection cannot verify drafts that are merged with those of others.
    is_coupled = resources.is_combined
    if isinstance(head, MedusaHeads):
        return MedusaDrafter(head, depth=depth, has_trees=has_trees, source=source, is_coupled=is_coupled)
    network = None if has_trees else compile_head(head)
    return AutoregressiveDrafter(
        head, depth=depth, has_trees=has_trees, source=source, is_coupled=is_coupled, network=network
    )


def check_weights(kind: str, folder: Path | None, target: Path) -> None:
    """Raise UserError unless the weights of a kind fit the target in folder `target`; reads no weights.

    folder: None for the default of the kind.
    """
    if kind == "self-int8":
        return
    folder = folder or default_folder(kind, target)
    if kind == "draft-model":
        check_draft_model(folder, target)
    else:
        check_head(kind, folder, load_config(target), target_folder=target)


def default_folder(kind: str, target: Path) -> Path:
    """Return the folder of the weights of a kind if none is given. Raises UserError if there is no default."""
    if target == SHIPPED_MODEL:
        return SHIPPED_HEADS / kind
    if kind == "mtp":
        return target
    raise UserError(f"--drafter {kind} needs weights that were made for this model; give --draft-model FOLDER")


def _load(kind: str, target: TargetInfo, folder: Path | None) -> Head:
    """Return a head with its weights, attached to the target."""
    assert target.model is not None
    assert target.folder is not None
    dtype, device = target.dtype, str(target.device)
    head: Head
    if kind == "self-int8":
        copy = quantize_int8(load_model(target.folder, dtype=dtype, device=device))
        head = ModelHead(copy, shares_target_cache=True)
    elif kind == "draft-model":
        folder = folder or default_folder(kind, target.folder)
        head = ModelHead(pack(load_draft_model(folder, target.folder, dtype=dtype, device=device)))
    else:
        folder = folder or default_folder(kind, target.folder)
        head = pack(load_head(kind, folder, target.config, target_folder=target.folder, dtype=dtype, device=device))
    head.attach(target.model)
    return head
