"""Load models from Hugging Face folders and GGUF files, also as drafters of other models, and save them as folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drafter_service.client.gguf import is_gguf
from drafter_service.client.tokenizer import TOKENIZER_FILE
from engine.models.checkpoint import CONFIG_FILE, WEIGHTS_FILE, Checkpoint, is_finite, part_views
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.families import checkpoint_parts, mtp_tensors
from engine.models.folders import GENERATION_FILE, load_generation_defaults, read_json
from engine.models.gguf_model import config_fields
from engine.models.hf_config import config_from_hf
from engine.models.quantization import Quantization, read_quantization, weight_name
from engine.models.tokenizer import Tokenizer
from ssd.errors import UserError

D = TypeVar("D", bound=Decoder)
M = TypeVar("M", bound=nn.Module)
Shape = tuple[int, ...]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes that a model can run in, independent of the dtype of the stored weights."""
VOCABULARY = EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the embedding and the output projection in checkpoints."""


def load_model(folder: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    """Return a decoder with the weights of `folder`, or of a GGUF file, ready to run.

    Raises UserError for a missing or damaged file, for a config that does not match the weights, and for a model that
    cannot run in `dtype` on `device`.
    """
    folder = Path(folder)
    config = load_config(folder)
    refuse_unsupported(config, dtype, device)
    return load_weights(folder, config, lambda: Decoder(config), dtype, device)


def load_weights(
    folder: Path,
    config: ModelConfig,
    make: Callable[[], D],
    dtype: torch.dtype,
    device: str,
    part: Callable[[str, Shape, Shape], tuple[slice, ...]] | None = None,
) -> D:
    """Return a decoder with the weights of `folder`, or with a part of each, ready to run.

    config: shape of the model in `folder`. make: returns the decoder. part: returns the indices of a part, for the name
    of a tensor and the shapes of the tensor and of its part; None: all. Raises UserError like `load_model`.
    """
    checkpoint = model_checkpoint(folder)
    whole = shapes(checkpoint_views(on_meta_device(lambda: Decoder(config))))
    check_checkpoint(checkpoint, whole, config, mtp_tensors(read_fields(folder)))
    decoder = on_meta_device(make).to(dtype)
    parts = shapes(checkpoint_views(decoder))
    index = None if part is None else lambda name: part(name, whole[name], parts[name])
    allocate(decoder, device)
    checkpoint.copy_into(checkpoint_views(decoder), index)
    return decoder.eval().requires_grad_(False)


def refuse_unsupported(config: ModelConfig, dtype: torch.dtype, device: str) -> None:
    """Raise UserError for a model that this engine cannot run in a dtype on a device."""
    if config.experts is not None and torch.device(device).type != "cpu" and dtype != torch.bfloat16:
        # PyTorch's grouped product reads the sizes of the groups on the host for other dtypes.
        raise UserError(
            f"a mixture of experts runs on {device!r} only as bfloat16, not {str(dtype).removeprefix('torch.')}; "
            "give --dtype bfloat16, or --device cpu"
        )


def model_checkpoint(folder: Path) -> Checkpoint:
    """Return the weight files of the model in `folder`. Raises UserError."""
    config_file = "the metadata" if is_gguf(folder) else CONFIG_FILE
    return Checkpoint(folder, quantization=load_quantization(folder), config_file=config_file)


def load_quantization(folder: Path) -> Quantization | None:
    """Return the quantization of the model in `folder`; None if its weights are floats. Raises UserError."""
    return read_quantization(read_fields(folder))


def check_checkpoint(
    checkpoint: Checkpoint, whole: Mapping[str, Shape], config: ModelConfig, is_mtp: Callable[[str], bool]
) -> None:
    """Raise UserError unless a checkpoint has the weights of a model.

    whole: shapes of the decoder's tensors. is_mtp: whether a name is that of a tensor of MTP layers, which are not
    read. A decoder that projects with its embedding accepts a copy of it as the output projection, but no other one:
    transformers uses such a projection in spite of `tie_word_embeddings`.
    """
    has_head = config.tie_embeddings and any(weight_name(name) == HEAD for name in checkpoint.names())
    checkpoint.check({**whole, HEAD: whole[EMBEDDING]} if has_head else whole, is_redundant=is_mtp)
    if not has_head:
        return
    embedding, head = (checkpoint.read(name) for name in VOCABULARY)
    # Callers refuse values that are not finite, which equal nothing.
    if is_finite(embedding) and not (embedding == head.to(embedding.device)).all():
        raise UserError(
            f"{HEAD} differs from {EMBEDDING}, but tie_word_embeddings in {CONFIG_FILE} says that they are equal; "
            "set it to false there"
        )


def on_meta_device(make: Callable[[], M]) -> M:
    """Return a module without weights, whose names, shapes and dtypes can be compared with those of a checkpoint."""
    with torch.device("meta"), _NoInitialization():
        return make()


def shapes(views: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Return the shapes of tensors by their names."""
    return {name: tuple(tensor.shape) for name, tensor in views.items()}


class _NoInitialization(TorchFunctionMode):
    """Skips the initialization of parameters.

    On the meta device `nn.init.normal_` imports torch._dynamo, which is a third of the engine's start-up time.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def read_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of the `config.json` in `folder`, or those that a GGUF file describes. Raises UserError."""
    if is_gguf(folder):
        return config_fields(folder)
    if not folder.is_dir():
        raise UserError(
            f"there is no model folder {folder}; give a Hugging Face folder with {CONFIG_FILE}, or a GGUF file"
        )
    return read_json(folder / CONFIG_FILE)


def load_config(folder: Path) -> ModelConfig:
    """Return the shape of the model in `folder`. Raises UserError."""
    fields = read_fields(folder)
    try:
        config = config_from_hf(fields)
    except UserError as problem:
        raise UserError(str(problem).replace(CONFIG_FILE, str(folder), 1) if is_gguf(folder) else problem) from None
    # Chat models often name the token that ends a turn only in this file.
    more = load_generation_defaults(folder).eos_token_ids
    try:
        return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
    except ValueError as problem:
        raise UserError(
            f"{folder / GENERATION_FILE} has an invalid field: {problem}; download or copy it again"
        ) from None


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file. `save_file` of safetensors would let nobody but the owner read it."""
    path.write_bytes(save(dict(tensors), metadata={"format": "pt"}))


def save_model(
    decoder: Decoder, folder: Path, fields: Mapping[str, Any], *, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config.json and model.safetensors in the format that transformers and `load_model` read.

    fields: those of a `config.json` of this shape, except the number of layers and the dtype.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in checkpoint_views(decoder).items()}
    write_tensors(tensors, folder / WEIGHTS_FILE)
    own = {"num_hidden_layers": decoder.config.num_layers, "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG_FILE).write_text(json.dumps({**fields, **own}, indent=2) + "\n")


def checkpoint_views(decoder: Decoder) -> dict[str, Tensor]:
    """Return writable views of the decoder's weights by their names in checkpoints."""
    views: dict[str, Tensor] = {}
    for name, parameter in decoder.named_parameters():
        views |= part_views(parameter, checkpoint_parts(name, decoder.config))
    return views


def allocate(decoder: Decoder, device: str) -> None:
    """Allocate the weights of a decoder on the meta device, uninitialized, and compute its rope frequencies.

    Raises UserError if they do not fit into memory.
    """
    allocate_weights(decoder, device)
    decoder.tie()  # each name got a separate tensor
    decoder.frequencies = decoder.config.rope.frequencies(decoder.config.head_dim).repeat(2).to(device)


def allocate_weights(module: nn.Module, device: str) -> None:
    """Allocate weights of a module that are on the meta device, uninitialized. Raises UserError if they do not fit."""
    try:
        # `to_empty` does the same with operators on the meta device, which import SymPy.
        memory = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if tensor.is_meta else tensor
            for name, tensor in module.state_dict().items()
        }
        module.load_state_dict(memory, assign=True)
    except RuntimeError as problem:
        if "memory" not in str(problem):
            raise
        size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        raise UserError(
            f"{size / (1 << 30):.1f} GiB of weights do not fit into the memory of {device!r}; "
            "load the model as bfloat16, or choose a smaller one"
        ) from None


def check_draft_model(folder: Path, target_folder: Path) -> ModelConfig:
    """Return the shape of the model in `folder`. Raises UserError unless it can draft for the one in `target_folder`.

    Both must have the same tokens, which are compared if both folders have a tokenizer. Only then the sizes of their
    vocabularies may differ: models of one series are padded to different sizes (Qwen2.5: 151,936 and 152,064) with
    rows that belong to no token.
    """
    if folder.exists() and target_folder.exists() and folder.samefile(target_folder):
        raise UserError(
            f"{folder} is the target itself, which drafts no faster than it decodes; give --draft-model a smaller "
            "model, or use --drafter self-int8"
        )
    draft, target = load_config(folder), load_config(target_folder)
    tokens = _common_tokens(folder, target_folder)
    if draft.vocab_size != target.vocab_size and (tokens is None or tokens > min(draft.vocab_size, target.vocab_size)):
        raise UserError(
            f"{folder} has a vocabulary of {draft.vocab_size}, but the target has one of {target.vocab_size}; "
            "give --draft-model a model with the target's tokenizer"
        )
    return draft


def load_draft_model(
    folder: Path, target_folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Decoder:
    """Return the model in `folder` with as many rows for tokens as the one in `target_folder`.

    Raises UserError like `check_draft_model` and `load_model`.
    """
    check_draft_model(folder, target_folder)
    return fit_vocabulary(load_model(folder, dtype=dtype, device=device), load_config(target_folder).vocab_size)


def fit_vocabulary(model: Decoder, vocab_size: int) -> Decoder:
    """Remove the last rows of a model's embedding and output projection, or add rows of zeros. Returns the model."""
    if vocab_size == model.config.vocab_size:
        return model
    ends = tuple(token for token in model.config.eos_token_ids if token < vocab_size)
    model.config = replace(model.config, vocab_size=vocab_size, eos_token_ids=ends)
    model.embedding.weight = nn.Parameter(_fitted(model.embedding.weight, vocab_size), requires_grad=False)
    model.embedding.num_embeddings = vocab_size
    model.lm_head.weight = nn.Parameter(_fitted(model.lm_head.weight, vocab_size), requires_grad=False)
    model.lm_head.out_features = vocab_size
    model.tie()
    return model


def _fitted(weight: Tensor, rows: int) -> Tensor:
    fitted = weight.new_zeros(rows, weight.shape[1])
    kept = min(rows, len(weight))
    fitted[:kept] = weight[:kept]
    return fitted


def _common_tokens(folder: Path, target_folder: Path) -> int | None:
    """Return the number of ids up to the last token of both tokenizers; None if a folder has none.

    Raises UserError if they differ.
    """
    if not all(is_gguf(each) or (each / TOKENIZER_FILE).exists() for each in (folder, target_folder)):
        return None
    drafts, targets = (Tokenizer(each).tokens() for each in (folder, target_folder))
    for token in sorted(drafts.keys() | targets.keys()):
        if drafts.get(token) != targets.get(token):
            raise UserError(
                f"{folder} has another tokenizer than the target: token {token} is {drafts.get(token)!r} there and "
                f"{targets.get(token)!r} in {target_folder}; give --draft-model a model with the target's tokenizer"
            )
    return max(targets, default=-1) + 1
