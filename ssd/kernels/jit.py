"""Numba settings of all kernels: compiled for one signature, cached on disk, and run without the GIL.

A kernel is compiled when its module is first imported and loaded from the cache after that, so no call waits for the
compiler. Inputs are declared read-only, which accepts writable arrays too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ssd.kernels.cache import KernelCache
from ssd.kernels.interruption import interruptible
from ssd.kernels.progress import log_compilation

F = TypeVar("F", bound=Callable[..., Any])

Tokens = types.Array(types.uint32, 1, "C", readonly=True)
"""uint32 [N], read only: token ids or positions."""
TokensOut = types.Array(types.uint32, 1, "C")
"""uint32 [N], written by the kernel."""
TokenRows = types.Array(types.uint32, 2, "C")
"""uint32 [N, columns], written by the kernel."""
Floats = types.Array(types.float32, 1, "C", readonly=True)
"""float32 [N], read only."""
SourceCodes = types.Array(types.uint8, 1, "C", readonly=True)
"""uint8 [N], read only: a source of each draft token."""
FloatsOut = types.Array(types.float32, 1, "C")
"""float32 [N], written by the kernel."""
Bytes = types.Array(types.uint8, 1, "C")
"""uint8 [N]."""
Parents = types.Array(types.int32, 1, "C", readonly=True)
"""int32 [N], read only: the parent of each node of a tree."""
Longs = types.Array(types.int64, 1, "C")
"""int64 [N]."""
Ints = types.Array(types.int32, 1, "C")
"""int32 [N]."""
IntRows = types.Array(types.int32, 2, "C")
"""int32 [N, columns]."""
Ulongs = types.Array(types.uint64, 1, "C")
"""uint64 [N]."""
UlongRows = types.Array(types.uint64, 2, "C")
"""uint64 [N, columns]."""
Doubles = types.Array(types.float64, 1, "C")
"""float64 [N]."""
Bools = types.Array(types.boolean, 1, "C")
"""bool [N]."""
BoolRows = types.Array(types.boolean, 2, "C")
"""bool [N, columns]."""
BoolBlocks = types.Array(types.boolean, 3, "C")
"""bool [B, N, columns]."""
LongRows = types.Array(types.int64, 2, "C")
"""int64 [N, columns]."""
FloatRows = types.Array(types.float32, 2, "C")
"""float32 [N, columns]."""
FloatPages = types.Array(types.float32, 5, "C")
"""float32 [layers, pages, page size, heads, size]."""
SmallInts = types.Array(types.int8, 1, "C")
"""int8 [N]."""
Int = types.int64
Float = types.float64
IntPair = types.UniTuple(types.int64, 2)
FloatPair = types.UniTuple(types.float64, 2)
FiveInts = types.UniTuple(types.int64, 5)
Bool = types.boolean
Nothing = types.void
"""Result of kernels that only write to their arguments."""


def fields_of(kind: type, *fields: types.Type) -> types.Type:
    """Return the type of a NamedTuple of arrays and numbers. Arrays in it must be writable, unlike single ones."""
    return types.NamedTuple(fields, kind)


def kernel(*signature: types.Type, returns: types.Type) -> Callable[[F], F]:
    """Compile a function for one signature; it runs without the GIL and is cached on disk.

    Raises UserError if the function is not in the cache, and no folder for the cache is writable, and KeyboardInterrupt
    if it is interrupted.
    """
    decorate = _cached(nogil=True, boundscheck=False, error_model="numpy")

    def compiled(function: F) -> F:
        began = time.perf_counter()
        dispatcher = decorate(function)
        with interruptible():
            dispatcher.compile(returns(*signature))
        dispatcher.disable_compile()
        if dispatcher.stats.cache_misses:
            log_compilation(time.perf_counter() - began)
        return dispatcher

    return compiled


def _cached(**options: Any) -> Any:
    """Return a decorator of functions that numba compiles when they are first called, and that are cached on disk."""
    decorate = njit(**options)

    def cached(function: Callable[..., Any]) -> Any:
        dispatcher = decorate(function)
        dispatcher._cache = KernelCache(dispatcher)
        return dispatcher

    return cached


inline = _cached(nogil=True, inline="always", error_model="numpy")
"""Decorator of small helpers, which become part of the kernels that call them."""

outline = _cached(nogil=True, error_model="numpy", forceinline=True)
"""Decorator of larger helpers: numba compiles them once, and LLVM inlines them. A call would pass each array as a dozen
words and hide its strides, which takes a quarter of a draft's time."""

vectorized = _cached(
    nogil=True, boundscheck=False, error_model="numpy", fastmath={"contract", "reassoc", "nsz", "arcp"}
)
"""Decorator of float loops whose sums may be in any order, for vector instructions; infinities keep their meaning. Only
for results that rounding may change."""


@intrinsic  # type: ignore[untyped-decorator]
def peek(typingctx: Any, address: Any, index: Any) -> Any:  # noqa: ARG001
    """Return the uint32 at `address` + 4 * `index`.

    Texts and suffix arrays of many sequences are separate arrays; with a table of their addresses one call of a kernel
    reads them all. The caller keeps the arrays alive while the kernel runs.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        start = builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())
        return builder.load(builder.gep(start, [arguments[1]]))

    return types.uint32(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def pointer_to(typingctx: Any, address: Any) -> Any:  # noqa: ARG001
    """Convert an address to a pointer for `numba.carray`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def lowest_bit(typingctx: Any, mask: Any) -> Any:  # noqa: ARG001
    """Return the index of the lowest set bit of a uint32 other than 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.zext(builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1)), ir.IntType(64))

    return types.int64(types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def poke(typingctx: Any, address: Any, index: Any, value: Any) -> Any:  # noqa: ARG001
    """Write the uint32 `value` at `address` + 4 * `index`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        start = builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())
        builder.store(arguments[2], builder.gep(start, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typingctx: Any, address: Any) -> Any:  # noqa: ARG001
    """Start to load the cache line at an address that is read soon; an invalid address is harmless."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag]), "llvm.prefetch.p0"
        )
        # For reading, with high locality, from the data cache.
        builder.call(function, [builder.inttoptr(arguments[0], pointer), flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _exchange(typingctx: Any, address: Any, value: Any) -> Any:  # noqa: ARG001
    """Write a uint32 at an address and return the previous value, atomically."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        place = builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())
        return builder.atomic_rmw("xchg", place, arguments[1], "acq_rel")

    return types.uint32(types.int64, types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _yield_processor(typingctx: Any) -> Any:  # noqa: ARG001
    """Let another thread run on this processor (`sched_yield` of POSIX)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@outline
def acquire(lock):  # type: ignore[no-untyped-def]
    """Wait until no other thread holds a lock, uint32 [1], and take it.

    For a few microseconds of work within kernels, which cannot raise."""
    while _exchange(lock.ctypes.data, np.uint32(1)) != 0:
        _yield_processor()


@outline
def release(lock):  # type: ignore[no-untyped-def]
    """Release a lock."""
    _exchange(lock.ctypes.data, np.uint32(0))


@intrinsic  # type: ignore[untyped-decorator]
def count_bits(typingctx: Any, mask: Any) -> Any:  # noqa: ARG001
    """Return the number of set bits of a uint32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.zext(builder.ctpop(arguments[0]), ir.IntType(64))

    return types.int64(types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def bit_length(typingctx: Any, number: Any) -> Any:  # noqa: ARG001
    """Return the number of bits of a non-negative int64, 0 for 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.sub(ir.IntType(64)(64), builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0)))

    return types.int64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def equal_words(typingctx: Any, address: Any, word: Any) -> Any:  # noqa: ARG001
    """Compare the 32 uint32 at an address with `word`, in one vector comparison; return the mask of equal ones."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        words = ir.VectorType(ir.IntType(32), 32)
        found = builder.load(builder.inttoptr(arguments[0], words.as_pointer()), align=4)
        one = builder.insert_element(ir.Constant(words, ir.Undefined), arguments[1], ir.IntType(32)(0))
        every = builder.shuffle_vector(one, one, ir.Constant(words, [0] * 32))
        return builder.bitcast(builder.icmp_unsigned("==", found, every), ir.IntType(32))

    return types.uint32(types.int64, types.uint32), generate
