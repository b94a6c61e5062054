"""Choose between an operation's PyTorch reference and its Triton kernel.

Each operation is one file: a reference in PyTorch, which runs on every device, a function that launches a Triton
kernel, and the kernel. Triton is imported when a kernel is first launched, so it may be missing on other machines;
files import its language as `tl` for type checkers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


@cache
def has_triton() -> bool:
    """Return whether Triton is installed, whether or not a device can run its kernels."""
    return find_spec("triton") is not None


class Operation(Generic[P, R]):
    """An operation with two implementations of one signature, `torch` and `triton`."""

    def __init__(self, reference: Callable[P, R], kernel: Callable[P, R]) -> None:
        """reference: for every device. kernel: launches a Triton kernel on CUDA devices."""
        self.torch = reference
        self.triton = kernel
        self.__doc__ = reference.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the kernel if Triton is installed and one of the arguments is a tensor on a CUDA device."""
        is_cuda = any(isinstance(argument, Tensor) and argument.is_cuda for argument in args)
        return (self.triton if is_cuda and has_triton() else self.torch)(*args, **kwargs)


class Kernel:
    """A Triton kernel, or a function for kernels. `kernel[grid](...)` launches it."""

    def __init__(self, function: FunctionType, **options: Any) -> None:
        """options: those of `triton.jit`."""
        self._function = function
        self._options = options

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a function that launches the kernel, one program for each cell of the grid."""
        return self.compiled[grid]

    @cached_property
    def compiled(self) -> Any:
        """The result of `triton.jit`, which runs on the CPU if TRITON_INTERPRET is 1."""
        import triton
        import triton.language

        function = self._function
        names = {
            name: value.compiled if isinstance(value, Kernel) else value
            for name, value in function.__globals__.items()
            if name in function.__code__.co_names
        }
        names |= {"tl": triton.language, "__builtins__": function.__globals__["__builtins__"]}
        copy = FunctionType(function.__code__, names, function.__name__)
        copy.__module__, copy.__annotations__ = function.__module__, function.__annotations__
        return triton.jit(copy, **self._options)


def kernel(*, do_not_specialize: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Return a decorator for Triton kernels. do_not_specialize: arguments whose values do not recompile the kernel."""
    return lambda function: Kernel(function, do_not_specialize=list(do_not_specialize))


def next_power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is at least `number`, which must be positive."""
    return 1 << (number - 1).bit_length()
