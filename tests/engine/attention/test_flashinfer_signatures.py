"""FlashInfer's interface accepts our calls, and the twin in these tests accepts nothing else.

FlashInfer's own wrappers run on the CPU; only the compiled modules under them are replaced by slow twins. That the
library itself gives the twin's results is tested on a GPU (test_flashinfer.py, test_chunks.py).
"""

import inspect
from types import SimpleNamespace

import pytest
import torch

from tests.engine import flashinfer_fa2 as fa2
from tests.engine.attention import test_chunks
from tests.engine.attention.test_flashinfer import compare
from tests.engine.flashinfer_twin import TWIN, Library

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


@pytest.fixture
def library(monkeypatch):
    """FlashInfer's wrappers over twins of their kernels, and twins of its functions with its signatures."""
    if not torch.cuda.is_available():
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *given, pin_memory=False, **named: empty(*given, **named))
    module = SimpleNamespace(plan=fa2.plan, paged_run=fa2.paged_run, ragged_run=fa2.ragged_run)
    monkeypatch.setattr("flashinfer.prefill.get_batch_prefill_module", lambda backend, *_: {"fa2": module}[backend])
    # The twins read unpacked masks.
    monkeypatch.setattr("flashinfer.prefill.segment_packbits", lambda mask, indptr, bitorder: (mask, indptr))

    def bound(real, twin):
        signature = inspect.signature(real)

        def call(*given, **named):
            signature.bind(*given, **named)
            return twin(*given, **named)

        return call

    functions = {name: bound(getattr(flashinfer, name), getattr(TWIN, name)) for name in FUNCTIONS}
    wrappers = {name: getattr(flashinfer, name) for name in WRAPPERS}
    library = SimpleNamespace(**functions, **wrappers)
    monkeypatch.setattr("engine.attention.flashinfer.flashinfer", lambda: library)
    monkeypatch.setattr("engine.attention.flashinfer.WORKSPACE_BYTES", 1 << 26)
    return library


def test_its_wrappers_accept_ragged_steps(library):
    compare(Library("cpu", torch.float32, 2e-5), 5, sharing=(8, 2))


def test_its_wrappers_accept_steps_of_single_tokens(library):
    compare(Library("cpu", torch.float32, 2e-5), 6, sharing=(8, 2), kinds=("single",))


@pytest.mark.parametrize("seed", range(3))
def test_its_wrappers_accept_steps_of_fixed_shapes(library, seed, monkeypatch):
    monkeypatch.setattr(fa2, "LEAST_CHUNK", 2 * test_chunks.PAGE_SIZE)
    test_chunks.compare(seed, heads=(8, 2), library=library)
