"""What can be decoded with drafts, and how the host decodes everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from importlib.metadata import version
from typing import Any

from drafter_service.plugins.settings import untested

TESTED = ("5.23", "5.24")
"""Versions of transformers, without the last number."""

PRIVATE_NAMES = ("_assisted_decoding", "_beam_search", "_get_candidate_generator", "_sample")
"""Private methods of `GenerationMixin` that this module calls or replaces."""

DECODERS = {
    "greedy_search": "_sample",
    "sample": "_sample",
    "assisted_generation": "_sample",
    "beam_search": "_beam_search",
    "beam_sample": "_beam_search",
}
"""The host's decoding method by `GenerationMode`; assisted generation without drafts is one of the first two."""

INPUTS = (
    "attention_mask",
    "cache",
    "generation_config",
    "logits_processor",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "stopping_criteria",
    "synced_gpus",
    "use_cache",
)
"""Arguments of decoding methods with which batches are decoded."""

ROW_PROCESSORS = (
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
)
"""Logits processors that treat each row by itself, wherever it is in the batch, and keep nothing between calls.

They are also called after draft tokens that are rejected. `PrefixConstrainedLogitsProcessor` is not among them: it
raises an exception if its function allows no token there."""

WHOLE_BATCH_PROCESSORS = ("RepetitionPenaltyLogitsProcessor",)
"""Those of `ROW_PROCESSORS` that know the padding of each row, so that they must be called with all rows."""

EXACT_CRITERIA = ("EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria")
"""Criteria at which assisted decoding stops where plain decoding stops. It checks others once per step, not once per
token, and would return more tokens than plain decoding."""

ROW_CRITERIA = (*EXACT_CRITERIA, "StopStringCriteria")
"""Criteria that `Stops` checks for each token of each row."""

STATES = ("output_attentions", "output_hidden_states", "output_logits", "output_scores")
"""Options of `generate` with which it returns more than sequences."""


def unsupported_version(model_class: type) -> str:
    """Return why the installed transformers cannot be used, or ""."""
    if reason := untested("transformers", version("transformers"), TESTED):
        return reason
    missing = [name for name in PRIVATE_NAMES if not hasattr(model_class, name)]
    return f"{model_class.__name__} has no {', '.join(missing)}" if missing else ""


def reason_against(model: Any, input_ids: Any, arguments: dict[str, Any]) -> str:
    """Return why a call cannot be decoded with drafts, so that its output would be that of plain decoding, or "".

    input_ids: int64 [B, P]. arguments: those of the host's decoding methods.
    """
    cache = cache_of(arguments)
    config = arguments["generation_config"]
    processors = names_besides(ROW_PROCESSORS, arguments["logits_processor"])
    fixed = ", ".join(sorted({type(each).__name__ for each in getattr(cache, "layers", ()) if is_fixed(each)}))
    others = names_besides(EXACT_CRITERIA if len(input_ids) == 1 else ROW_CRITERIA, arguments["stopping_criteria"])
    reasons: dict[str, Callable[[], bool]] = {
        "beam search and the like are not supported": lambda: decoder_of(config) != "_sample",
        # Each process would have drafts of its own, and take another number of steps.
        "processes that run each step together (synced_gpus) are not supported": lambda: arguments["synced_gpus"],
        "prompts without token ids are not supported": lambda: input_ids.shape[1] == 0,
        "encoder-decoder models are not supported": lambda: model.config.is_encoder_decoder,
        "the model cannot take tokens back": lambda: model._is_stateful,
        "a KV cache is needed": lambda: cache is None or not arguments.get("use_cache"),
        "static KV caches are not supported": lambda: "Static" in type(cache).__name__,
        f"KV caches with {fixed} are not supported": lambda: fixed != "",
        "a KV cache from an earlier call is not supported": lambda: cache.get_seq_length() > 0,
        f"the stopping criterion {others} is not supported": lambda: others != "",
        f"the logits processor {processors} is not supported": lambda: processors != "",
    }
    reason = next((reason for reason, applies in reasons.items() if applies()), "")
    return reason or (reason_against_batch(arguments) if len(input_ids) > 1 else "")


def reason_against_batch(arguments: dict[str, Any]) -> str:
    """Return why a batch cannot be decoded with drafts, although one sequence could be, or ""."""
    cache, config, criteria = cache_of(arguments), arguments["generation_config"], arguments["stopping_criteria"]
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    layers = names_besides(["DynamicLayer"], cache.layers)
    inputs = ", ".join(name for name, value in arguments.items() if name not in INPUTS and value is not None)
    reasons: dict[str, Callable[[], bool]] = {
        "a streamer of a batch is not supported": lambda: "streamer" in arguments,
        f"batches with {inputs} are not supported": lambda: inputs != "",
        "batches without position ids are not supported": lambda: positions is None or positions.ndim != 2,
        "batches that are not padded on the left are not supported": lambda: not is_left_padded(mask),
        f"KV caches with {layers or type(cache).__name__} are not supported in batches": lambda: (
            layers != "" or type(cache).__name__ != "DynamicCache" or cache.offloading
        ),
        # It could not be used again, because finished rows are removed from it.
        "KV caches of the caller are not supported in batches": lambda: getattr(cache, "_is_user_defined", False),
        "scores and states of batches are not supported": lambda: (
            config.return_dict_in_generate and any(getattr(config, name) for name in STATES)
        ),
        # In plain decoding, finished rows grow until the last one is finished.
        "batches without an end token are supported only up to a length": lambda: (
            names_besides(["MaxLengthCriteria"], criteria) != ""
            and "EosTokenCriteria" not in [type(each).__name__ for each in criteria]
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies()), "")


def is_synced(model: Any) -> bool:
    """Return whether the processes of a model must run each step together, as `generate` decides it by default."""
    from torch import distributed
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module

    is_sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    return is_sharded and distributed.is_initialized() and distributed.get_world_size() > 1


def with_limits_of(criteria: Sequence[Any], config: Any, input_ids: Any) -> Any:
    """Return a copy of a generation config whose maximum length and end tokens are those of the stopping criteria.

    A criterion of the caller replaces that of the config, by which assisted decoding cuts the tokens of a step.
    input_ids: int64 [B, P].
    """
    config = copy(config)
    lengths = [each.max_length for each in criteria if type(each).__name__ == "MaxLengthCriteria"]
    # Plain decoding checks the length after a token.
    config.max_length = max(min(lengths, default=config.max_length), input_ids.shape[1] + 1)
    config._eos_token_tensor = input_ids.new_tensor(end_tokens(criteria))
    return config


def end_tokens(criteria: Sequence[Any]) -> list[int]:
    """Return the tokens after which stopping criteria end a row."""
    ends = [each.eos_token_id for each in criteria if type(each).__name__ == "EosTokenCriteria"]
    return [token for tokens in ends for token in tokens.flatten().tolist()]


def cache_of(arguments: dict[str, Any]) -> Any:
    """Return the KV cache among the arguments of a decoding method, or None."""
    # The second is its name until version 5.23.
    return arguments.get("cache", arguments.get("past_key_values"))


def is_fixed(layer: Any) -> bool:
    """Return whether tokens cannot be removed from a layer of a KV cache, as far as that is known before a step."""
    # Quantized layers say so from version 5.24 on; linear attention says it after the first step, by a property.
    return "Quantized" in type(layer).__name__ or getattr(type(layer), "is_croppable", True) is False


def is_left_padded(mask: Any) -> bool:
    """Return whether all padding is before the prompts; mask: int64 [B, P], or None without padding."""
    return mask is None or bool((mask[:, 1:] >= mask[:, :-1]).all() and (mask[:, -1] == 1).all())


def names_besides(known: Sequence[str], objects: Sequence[Any]) -> str:
    """Return the names of the types of objects that are not known, separated by commas."""
    return ", ".join(name for each in objects if (name := type(each).__name__) not in known)


def decoder_of(config: Any) -> str:
    """Return the name of the host's own decoding method. Raises ValueError for a mode that has none."""
    mode = config.get_generation_mode().value
    if mode not in DECODERS:
        raise ValueError(f"{mode} is not supported with drafts; call generate without custom_generate=SsdGenerate(...)")
    return DECODERS[mode]
