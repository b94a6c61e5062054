"""Compiles every kernel for a GPU that this machine need not have; a process of its own, since others interpret."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.device import draw_triton, lookup_triton, verify_triton
from engine.request import GREEDY_BELOW

HOPPER = GPUTarget("cuda", 90, 32)
DRAFTED = {
    "tokens": "*i64",
    "parents": "*i32",
    "starts": "*i32",
    "counts": "*i32",
    "scheduled": "*i32",
    "seats": "*i64",
}
STATE = {"lengths": "*i32", "computed": "*i32", "last_tokens": "*i32", "history": "*i32", "history_stride": "i32"}
OUT = {"out_tokens": "*i32", "out_rows": "*i32", "out_counts": "*i32", "width": "i32"}


def compile_kernel(kernel, signature, constants, warps):
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    triton.compile(source, target=HOPPER, options={"num_warps": warps})


for is_tree in (False, True):
    shape = {"IS_TREE": is_tree, "BLOCK": 32}
    common = {**DRAFTED, **STATE, **OUT}
    compile_kernel(verify_triton._verify, {"chosen": "*i64", **common}, shape, 1)
    odds = {"p": "*fp32", "q": "*fp32", "q_starts": "*i32", "seeds": "*i64", "vocab": "i32"}
    compile_kernel(verify_triton._reject, {**odds, **common}, {**shape, "VOCAB_BLOCK": 4096}, 8)

texts = {"seats": "*i64", "lengths": "*i32", "history": "*i32", "history_stride": "i32"}
drafts = {"out_tokens": "*i32", "out_counts": "*i32", "width": "i32"}
compile_kernel(
    lookup_triton._look_up, {**texts, **drafts}, {"LONGEST": 4, "BLOCK": lookup_triton.BLOCK, "WIDTH": 16}, 8
)

rows = {"logits": "*fp32", "row_stride": "i32", "temperatures": "*fp64", "seeds": "*i64", "positions": "*i64"}
drawn = {"floors": "*fp32", "out_scores": "*fp32", "out_tokens": "*i64", "vocab": "i32", "size": "i32"}
for has_floors in (False, True):
    constants = {"GREEDY_BELOW": GREEDY_BELOW, "HAS_FLOORS": has_floors, "BLOCK": draw_triton.BLOCK}
    compile_kernel(draw_triton._draw, {**rows, **drawn}, constants, 4)
