"""FlashInfer's interface has what the twin in these tests accepts, with the defaults that calls rely on.

That the library itself gives the twin's results is tested on a GPU (test_flashinfer.py, test_chunks.py).
"""

import inspect

import pytest

from tests.engine.flashinfer_twin import TWIN

flashinfer = pytest.importorskip("flashinfer", reason="needs FlashInfer, though no GPU")

FUNCTIONS = (
    "merge_state",
    "append_paged_kv_cache",
    "rmsnorm",
    "fused_add_rmsnorm",
    "apply_rope_with_cos_sin_cache_inplace",
    "silu_and_mul",
)
WRAPPERS = ("BatchPrefillWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper")
METHODS = ("__init__", "plan", "run")
DEFAULTS = {
    "plan": {
        "pos_encoding_mode": "NONE", "causal": False, "window_left": -1, "logits_soft_cap": None, "sm_scale": None,
        "o_data_type": None, "non_blocking": True, "fixed_split_size": None, "disable_split_kv": False,
    },
    "run": {"lse_base": "log2", "lse_layout": "NH"},
}  # fmt: skip
"""Default arguments that calls rely on, by method; a wrapper need not have all of them."""


def real_and_twin():
    """Pairs of functions of the library and of the twin."""
    for name in FUNCTIONS:
        yield name, getattr(flashinfer, name), getattr(TWIN, name)
    for wrapper in WRAPPERS:
        for method in METHODS:
            yield f"{wrapper}.{method}", *(getattr(getattr(library, wrapper), method) for library in (flashinfer, TWIN))
    prefill = "BatchPrefillWithPagedKVCacheWrapper"
    reset = [getattr(library, prefill).reset_workspace_buffer for library in (flashinfer, TWIN)]
    yield f"{prefill}.reset_workspace_buffer", *reset


@pytest.mark.parametrize(("real", "twin"), [pytest.param(*pair, id=name) for name, *pair in real_and_twin()])
def test_the_twin_has_no_additional_parameters(real, twin):
    theirs = inspect.signature(real).parameters
    ours = inspect.signature(twin).parameters.values()
    positional = [one.name for one in ours if one.kind is not one.KEYWORD_ONLY]
    assert positional == list(theirs)[: len(positional)]
    assert {one.name for one in ours} <= theirs.keys()


def test_default_arguments_are_unchanged():
    for method, defaults in DEFAULTS.items():
        found = {}
        for wrapper in WRAPPERS:
            parameters = inspect.signature(getattr(getattr(flashinfer, wrapper), method)).parameters
            own = {name: parameters[name].default for name in defaults.keys() & parameters.keys()}
            assert own.items() <= defaults.items(), (wrapper, method)
            found |= own
        assert found == defaults
    rope = inspect.signature(flashinfer.apply_rope_with_cos_sin_cache_inplace).parameters
    assert rope["is_neox"].default is True
