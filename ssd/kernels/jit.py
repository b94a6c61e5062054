"""Numba settings of all kernels: compiled for one signature, cached on disk, and run without the GIL.

A kernel is compiled when its module is first imported and loaded from the cache after that, so no call waits for the
compiler. Inputs are declared read-only, which accepts writable arrays too.
"""

from __future__ import annotations

import functools
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
    return types.BaseTuple.from_types(fields, kind)


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


def _instruction(returns: types.Type, *given: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function of kernels from a function that generates its code.

    The decorated function gets LLVM's builder and the values of the arguments, of the types `given`, and returns the
    value of the result, None if it has none.
    """

    def decorate(generate: Callable[..., Any]) -> Any:
        @functools.wraps(generate)
        def define(_context: Any, *_types: Any) -> Any:
            def code(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
                # `ssd.kernels.cache` finds the function in the attribute.
                value = define.__wrapped__(builder, *arguments)
                return context.get_dummy_value() if value is None else value

            return returns(*given), code

        return intrinsic(define)

    return decorate


_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_WORD = _INT32.as_pointer()


@_instruction(types.uint32, types.int64, types.int64)
def peek(builder: Any, address: Any, index: Any) -> Any:
    """Return the uint32 at `address` + 4 * `index`.

    Texts and suffix arrays of many sequences are separate arrays; with a table of their addresses one call of a kernel
    reads them all. The caller keeps the arrays alive while the kernel runs.
    """
    return builder.load(builder.gep(builder.inttoptr(address, _WORD), [index]))


@_instruction(types.void, types.int64, types.int64, types.uint32)
def poke(builder: Any, address: Any, index: Any, value: Any) -> None:
    """Write the uint32 `value` at `address` + 4 * `index`."""
    builder.store(value, builder.gep(builder.inttoptr(address, _WORD), [index]))


@_instruction(types.void, types.int64)
def prefetch(builder: Any, address: Any) -> None:
    """Start to load the cache line at an address that is read soon; an invalid address is harmless."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _INT32, _INT32, _INT32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # For reading, with high locality, from the data cache.
    builder.call(function, [builder.inttoptr(address, pointer), _INT32(0), _INT32(3), _INT32(1)])


@_instruction(types.uint32, types.int64, types.uint32)
def _exchange(builder: Any, address: Any, value: Any) -> Any:
    """Write a uint32 at an address and return the previous value, atomically."""
    return builder.atomic_rmw("xchg", builder.inttoptr(address, _WORD), value, "acq_rel")


@_instruction(types.uint32, types.int64, types.uint32)
def add_to(builder: Any, address: Any, value: Any) -> Any:
    """Add to a uint32 at an address, modulo 2^32, and return the previous value; all threads see the same order."""
    return builder.atomic_rmw("add", builder.inttoptr(address, _WORD), value, "seq_cst")


@_instruction(types.void)
def _yield_processor(builder: Any) -> None:
    """Let another thread run on this processor (`sched_yield` of POSIX)."""
    builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(_INT32, []), "sched_yield"), [])


@outline
def try_acquire(lock):  # type: ignore[no-untyped-def]
    """Take a lock, uint32 [1], unless another thread holds it; return whether it was taken.

    For a few microseconds of work within kernels, which cannot raise."""
    return _exchange(lock.ctypes.data, np.uint32(1)) == 0


@outline
def acquire(lock):  # type: ignore[no-untyped-def]
    """Wait until no other thread holds a lock, and take it, see `try_acquire`."""
    while not try_acquire(lock):
        _yield_processor()


@outline
def release(lock):  # type: ignore[no-untyped-def]
    """Release a lock."""
    _exchange(lock.ctypes.data, np.uint32(0))


@_instruction(types.int64, types.uint32)
def lowest_bit(builder: Any, mask: Any) -> Any:
    """Return the index of the lowest set bit of a uint32 other than 0."""
    return builder.zext(builder.cttz(mask, ir.Constant(ir.IntType(1), 1)), _INT64)


@_instruction(types.int64, types.uint32)
def count_bits(builder: Any, mask: Any) -> Any:
    """Return the number of set bits of a uint32."""
    return builder.zext(builder.ctpop(mask), _INT64)


@_instruction(types.int64, types.int64)
def bit_length(builder: Any, number: Any) -> Any:
    """Return the number of bits of a non-negative int64, 0 for 0."""
    return builder.sub(_INT64(64), builder.ctlz(number, ir.Constant(ir.IntType(1), 0)))


@_instruction(types.uint32, types.int64, types.uint32)
def equal_words(builder: Any, address: Any, word: Any) -> Any:
    """Compare the 32 uint32 at an address with `word`, in one vector comparison; return the mask of equal ones."""
    words = ir.VectorType(_INT32, 32)
    found = builder.load(builder.inttoptr(address, words.as_pointer()), align=4)
    one = builder.insert_element(ir.Constant(words, ir.Undefined), word, _INT32(0))
    every = builder.shuffle_vector(one, one, ir.Constant(words, [0] * 32))
    return builder.bitcast(builder.icmp_unsigned("==", found, every), _INT32)
