"""Kernels compile for a GPU, without one. The interpreter accepts code that the compiler does not."""

import os
import subprocess
import sys

import pytest

from engine.executor.kernels import inputs, sample, verify
from engine.scheduling.request import GREEDY_BELOW

SCALARS = {"width", "batch", "rows", "idle", "scratch", "page_size", "vocab", "size"}
TYPES = {
    "request_slots": "*i64",
    "target_tokens": "*i64",
    "logits": "*fp32",
    "temperatures": "*fp64",
    "seeds": "*i64",
    "positions": "*i64",
    "floors": "*fp32",
    "out_scores": "*fp32",
    "out_positions": "*i64",
    "out_cache_slots": "*i64",
    "out_request_slots": "*i64",
}


def test_kernels_compile_for_a_gpu():
    """In a separate process, because other tests interpret them."""
    pytest.importorskip("triton", reason="needs Triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def compile_kernel(kernel, warps, constants, **types):
    """Compile for a Hopper GPU. types: of arguments that are neither scalars, nor in `TYPES`, nor arrays of int32."""
    compiled = kernel.compiled
    signature = {}
    for name in compiled.arg_names:
        is_scalar = name in SCALARS or name.endswith(("_stride", "_step"))
        signature[name] = "constexpr" if name in constants else "i32" if is_scalar else TYPES.get(name, "*i32")
    source = compiler.ASTSource(fn=compiled, signature=signature | types, constexprs=constants)
    compiler.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


if __name__ == "__main__":
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    compile_kernel(verify._verify, 1, {"BLOCK": 32}, tokens="*i64")
    compile_kernel(inputs._build, 1, {"BLOCK": inputs.BLOCK}, out_tokens="*i64")
    for has_floors in (False, True):
        constants = {"GREEDY_BELOW": GREEDY_BELOW, "HAS_FLOORS": has_floors, "BLOCK": sample.BLOCK}
        compile_kernel(sample._sample, 4, constants, out_tokens="*i64")
