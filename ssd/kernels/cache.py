"""The cache of compiled kernels: files that are named by everything that was compiled into them.

numba's own cache only checks the module that defines a function, but functions and constants of other modules are
compiled into it, too; after an edit or update of those, an old kernel would write to wrong places in memory. Here the
name of a file contains a digest of the code of a function and of all functions that it calls, of the globals that they
read, and of the types of the arguments. So an edit compiles what uses it and nothing else, nothing is deleted that
another process may load, and processes with different versions may share a folder.
"""

from __future__ import annotations

import hashlib
import marshal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import llvmlite
import numba
import numpy as np
from numba import types
from numba.core.caching import (
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    InTreeCacheLocator,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
)
from numba.core.dispatcher import Dispatcher
from numba.core.sigutils import normalize_signature

from ssd.errors import UserError

NO_CACHE_FOLDER = (
    "compiled kernels cannot be saved, neither beside the modules nor in this user's home: "
    "set the environment variable NUMBA_CACHE_DIR to a folder that only this user may write to"
)
VERSIONS = (sys.version, numba.__version__, llvmlite.__version__, np.__version__)
LIBRARIES = {"llvmlite", "math", "numba", "numpy"}
"""Packages whose functions and types are described by their names. An `overload` that this project registered for one
of them would not be part of a fingerprint."""


class _ReadableLocator(InTreeCacheLocator):  # type: ignore[misc]
    """Kernels that another user compiled beside the modules. numba's own locators need writable folders."""

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _ReadableLocator:
        """Return the locator of a function."""
        return cls(py_func, py_file)

    def ensure_cache_path(self) -> None:
        """Raise UserError. numba calls this to save a kernel, because the cache has none for this kind of processor."""
        raise UserError(NO_CACHE_FOLDER)


class _Locators(CompileResultCacheImpl):  # type: ignore[misc]
    """The places where kernels may be, in this order."""

    _locator_classes = (UserProvidedCacheLocator, InTreeCacheLocator, UserWideCacheLocator, _ReadableLocator)


class KernelCache(FunctionCache):  # type: ignore[misc]
    """The cached versions of a function.

    Globals are read when the function is loaded or compiled, so a module may define them after it.
    """

    _impl_class = _Locators

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(dispatcher.py_func)
        self._dispatcher = dispatcher

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the function compiled for a signature; None if it is not in the cache."""
        self._select_file(sig)
        return super().load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save the function compiled for a signature. Raises UserError if no folder is writable."""
        self._select_file(sig)
        super().save_overload(sig, data)

    def _select_file(self, sig: Any) -> None:
        """Select the file of a signature. In a file for several, two processes could overwrite each other's entry."""
        processor = self._dispatcher.targetctx.codegen().magic_tuple()
        digest = fingerprint(self._dispatcher, normalize_signature(sig), processor)
        self._cache_file = IndexDataCacheFile(self._cache_path, f"{self._py_func.__name__}-{digest}", VERSIONS)


def fingerprint(*values: object) -> str:
    """Return a digest of constants, types and functions, and of everything that is compiled into these functions.

    Raises TypeError if a function uses something that has no description here.
    """
    functions: list[FunctionType] = []
    state = hashlib.sha256(repr((VERSIONS, [_describe(value, functions) for value in values])).encode())
    described = set()
    for function in functions:  # Describing a function appends those that it calls.
        if function not in described:
            described.add(function)
            state.update(_describe_function(function, functions))
    return state.hexdigest()[:32]


def _describe_function(function: FunctionType, functions: list[FunctionType]) -> bytes:
    """Return the code of a function and the values that it reads. Appends the functions that it calls."""
    code = _without_lines(function.__code__, function.__doc__)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    # Names of attributes are among these, so a global that the function does not read may be, too.
    names = sorted(function.__globals__.keys() & set(_names(code)))
    values = [function.__defaults__, function.__kwdefaults__, *cells, *(function.__globals__[name] for name in names)]
    try:
        # A compiled function imports the modules of what it calls, so it is of no use after one of them has moved.
        text = repr((function.__module__, names, [_describe(value, functions) for value in values]))
    except TypeError as error:
        raise TypeError(f"{function.__module__}.{function.__qualname__} uses {error}") from None
    return marshal.dumps(code, 2) + text.encode()  # Later formats depend on which objects are shared.


def _without_lines(code: CodeType, doc: str | None) -> CodeType:
    """Return code without what a change of comments or of lines above it would change."""
    constants = (_without_lines(each, None) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(
        co_filename="",
        co_firstlineno=0,
        co_linetable=b"",
        co_consts=tuple(None if doc is not None and each == doc else each for each in constants),
    )


def _names(code: CodeType) -> Iterator[str]:
    """Return the names of globals and attributes in the code of a function, and of functions within it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


def _describe(value: Any, functions: list[FunctionType]) -> str:
    """Return a text that differs for values that are compiled differently. Appends the functions among them."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype!r} {value.shape} {value.strides} {value.tobytes().hex()}"
    if isinstance(value, (set, frozenset)):
        return f"set {sorted(_describe(each, functions) for each in value)}"
    if isinstance(value, dict):
        return f"dict {[(_describe(key, functions), _describe(each, functions)) for key, each in value.items()]}"
    if isinstance(value, tuple):
        return f"{type(value)} {getattr(value, '_fields', '')} {[_describe(each, functions) for each in value]}"
    if isinstance(value, types.BaseTuple):
        kind = getattr(value, "instance_class", tuple), getattr(value, "fields", "")
        return f"{value} {kind} {[_describe(each, functions) for each in value.types]}"
    if isinstance(value, type) and hasattr(value, "_fields") and hasattr(value, "_field_defaults"):
        return f"{value} {value._fields} {_describe(value._field_defaults, functions)}"
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", type(value).__module__)
    if str(module).split(".")[0] in LIBRARIES:
        # The text of a module contains the folder where it is installed.
        return f"{module} {getattr(value, '__qualname__', '' if isinstance(value, ModuleType) else value)}"
    if isinstance(getattr(value, "__wrapped__", None), FunctionType):  # a compiled function or an intrinsic
        functions.append(value.__wrapped__)
        return f"{value.__wrapped__.__qualname__} {_describe(getattr(value, 'targetoptions', None), functions)}"
    raise TypeError(f"{value!r}, which is neither a constant, a NamedTuple nor a compiled function")
