"""Arrays of kernels, declared once: a field of a NamedTuple gives an array its name, its dtype and its shape.

    class Found(NamedTuple):
        tokens: Annotated[np.ndarray, np.uint32, MAX_FOUND]

A field may also be another such NamedTuple. A dimension is a number, or the name of a size that is known when the
arrays are allocated. From the declaration follow the arrays (`allocate`), their addresses (`addresses_of`), and what a
kernel makes of these (`opener`): forty arrays are passed to a kernel as one. Passing each of them would take longer
than drafting, and the kernel would count references whenever it passes one on. The owner of the addresses keeps the
arrays alive; shapes are not checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, TypeVar, get_origin, get_type_hints

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj, numpy_support

A = TypeVar("A", bound=tuple[Any, ...])


class ArrayLayout(NamedTuple):
    """An array of a declaration."""

    dtype: str
    shape: tuple[int | str, ...]


class Layout(NamedTuple):
    """A declaration: its NamedTuple, and the layouts of its fields."""

    kind: type
    fields: tuple[ArrayLayout | Layout, ...]


@functools.cache
def layout_of(kind: type) -> Layout:
    """Return what a NamedTuple declares."""
    fields: list[ArrayLayout | Layout] = []
    for hint in get_type_hints(kind, include_extras=True).values():
        if get_origin(hint) is Annotated:
            dtype, *shape = hint.__metadata__
            fields.append(ArrayLayout(np.dtype(dtype).name, tuple(shape)))
        else:
            fields.append(layout_of(hint))
    return Layout(kind, tuple(fields))


def allocate(kind: type[A], **sizes: int) -> A:
    """Return new arrays, filled with 0, as a declaration describes them; sizes: the dimensions that have names."""
    return _allocate(layout_of(kind), sizes)


def _allocate(layout: Any, sizes: dict[str, int]) -> Any:
    if isinstance(layout, Layout):
        return layout.kind(*(_allocate(field, sizes) for field in layout.fields))
    return np.zeros([sizes.get(size, size) for size in layout.shape], layout.dtype)


def arrays_in(part: Any) -> Iterator[np.ndarray]:
    """Return the arrays of a declared NamedTuple and of its parts, in their order."""
    if isinstance(part, np.ndarray):
        yield part
    else:
        for each in part:
            yield from arrays_in(each)


def addresses_of(arrays: tuple[Any, ...], *numbers: int) -> np.ndarray:
    """Return numbers and the addresses of all arrays, int64, as `opener` expects them."""
    return np.array([*numbers, *(array.ctypes.data for array in arrays_in(arrays))], np.int64)


def opener(kind: type, *names: str) -> Callable[[np.ndarray], Any]:
    """Return a function for kernels that makes a declared NamedTuple from `addresses_of` its arrays.

    names: what the numbers before the addresses are; those that are sizes have the names of dimensions.
    """
    layout, first_address = layout_of(kind), len(names)
    result = _type_of(layout)

    @intrinsic  # type: ignore[untyped-decorator]
    def opened(typingctx: Any, addresses: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            given = context.make_array(signature.args[0])(context, builder, arguments[0])
            places = iter(range(first_address, 1 << 20))

            def entry(index: int) -> Any:
                return builder.load(builder.gep(given.data, [ir.IntType(64)(index)]))

            def open_part(part: Any, of: Any) -> Any:
                if isinstance(of, types.BaseTuple):
                    return context.make_tuple(
                        builder, of, [open_part(*each) for each in zip(part.fields, of, strict=True)]
                    )
                array = context.make_array(of)(context, builder)
                address = builder.inttoptr(entry(next(places)), array.data.type)
                shape = [ir.IntType(64)(n) if isinstance(n, int) else entry(names.index(n)) for n in part.shape]
                strides = [ir.IntType(64)(context.get_abi_sizeof(context.get_data_type(of.dtype)))]
                for size in shape[:0:-1]:
                    strides.insert(0, builder.mul(strides[0], size))
                sizes = (cgutils.pack_array(builder, each) for each in (shape, strides))
                arrayobj.populate_array(array, address, *sizes, strides[-1], None)
                return array._getvalue()

            return open_part(layout, result)

        return result(addresses), generate

    return opened


def _type_of(layout: Any) -> types.Type:
    """Return numba's type of a declared NamedTuple or array."""
    if isinstance(layout, Layout):
        return types.NamedTuple([_type_of(field) for field in layout.fields], layout.kind)
    return types.Array(numpy_support.from_dtype(np.dtype(layout.dtype)), len(layout.shape), "C")
