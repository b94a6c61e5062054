"""Compiles every kernel for a GPU that this machine need not have; a process of its own, since others interpret."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.executor.kernels import draw_triton, follow_triton, inputs_triton, lookup_triton, verify_triton
from engine.scheduling.request import GREEDY_BELOW

LONG = {"seats", "out_tokens", "out_positions", "out_slots", "out_seats"}
HOPPER = GPUTarget("cuda", 90, 32)
DRAFTED = {
    "tokens": "*i64",
    "starts": "*i32",
    "counts": "*i32",
    "scheduled": "*i32",
    "seats": "*i64",
}
STATE = {"lengths": "*i32", "computed": "*i32", "last_tokens": "*i32", "history": "*i32", "history_stride": "i32"}


def compile_kernel(kernel, signature, constants, warps):
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    triton.compile(source, target=HOPPER, options={"num_warps": warps})


shape = {"chosen": "*i64", **DRAFTED, **STATE, "out_tokens": "*i32", "out_counts": "*i32", "width": "i32"}
compile_kernel(verify_triton._verify, shape, {"BLOCK": 32}, 1)

texts = {"seats": "*i64", "lengths": "*i32", "history": "*i32", "history_stride": "i32"}
drafts = {"out_tokens": "*i32", "out_counts": "*i32", "width": "i32"}
found = {"spare": "*i32", "spare_stride": "i32", "out_found": "*i32"}
blocks = {"LONGEST": 4, "BLOCK": lookup_triton.BLOCK, "WIDTH": 16}
compile_kernel(lookup_triton._look_up, {**texts, **drafts, **found}, blocks, 8)
columns = dict.fromkeys(("tokens", "sizes", "bases", "most"), "*i32")
columns |= {f"{name}_stride": "i32" for name in columns} | {"size": "i32"}
compile_kernel(follow_triton._follow, {**texts, **drafts, **columns}, {"SIZE": 64, "WIDTH": 16}, 1)
names = inputs_triton._make.arg_names
integers = {name: "i32" for name in names if "stride" in name}
arrays = {name: "*i64" if name in LONG else "*i32" for name in names}
shape = dict.fromkeys(("batch", "rows", "idle", "scratch", "page_size"), "i32")
constants = {"BLOCK": inputs_triton.BLOCK}
del arrays["BLOCK"]
compile_kernel(inputs_triton._make, {**arrays, **integers, **shape}, constants, 1)

rows = {"logits": "*fp32", "row_stride": "i32", "temperatures": "*fp64", "seeds": "*i64", "positions": "*i64"}
drawn = {"floors": "*fp32", "out_scores": "*fp32", "out_tokens": "*i64", "vocab": "i32", "size": "i32"}
for has_floors in (False, True):
    constants = {"GREEDY_BELOW": GREEDY_BELOW, "HAS_FLOORS": has_floors, "BLOCK": draw_triton.BLOCK}
    compile_kernel(draw_triton._draw, {**rows, **drawn}, constants, 4)
