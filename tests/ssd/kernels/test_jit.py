"""Caching of compiled kernels, and the functions that are written in LLVM IR."""

import os
import runpy
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from numba import config, njit, types
from numba.core.caching import _CacheLocator

from ssd.errors import UserError
from ssd.kernels import jit
from ssd.kernels.jit import (
    Float,
    Int,
    Longs,
    Nothing,
    Tokens,
    TokensOut,
    acquire,
    bit_length,
    count_bits,
    drop_stale_kernels,
    equal_words,
    kernel,
    release,
)

KERNEL = "def add(one, other):\n    return one + other\n"


@pytest.mark.parametrize("has_own_folder", [False, True], ids=["beside modules", "NUMBA_CACHE_DIR"])
def test_cached_kernels_are_removed_when_any_module_that_they_use_changes(tmp_path, monkeypatch, has_own_folder):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache") if has_own_folder else "")
    package = tmp_path / "package"
    module = package / "part" / "helper.py"
    module.parent.mkdir(parents=True)
    module.write_text(KERNEL)
    other = tmp_path / "other.py"
    other.touch()

    def is_dropped():
        kernel(Int, Int, returns=Int)(runpy.run_path(str(module), run_name="ssd.example")["add"])
        [index] = tmp_path.rglob("*.nbi")
        drop_stale_kernels(package, SimpleNamespace(__file__=str(other)))
        return not index.exists()

    assert is_dropped()
    assert not is_dropped()
    os.utime(module, (0, 0))
    assert is_dropped()
    assert not is_dropped()
    (package / "another.py").touch()
    assert is_dropped()
    os.utime(other, (0, 0))
    assert is_dropped()


def test_kernels_of_a_cache_that_cannot_be_written_are_used(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    def load(name):
        return runpy.run_path(str(module), run_name=name)["add"]

    times = []
    monkeypatch.setattr(jit, "log_compilation", times.append)
    module = tmp_path / "module_with_kernels.py"
    module.write_text(KERNEL)
    assert kernel(Int, Int, returns=Int)(load("ssd.example")).stats.cache_misses
    monkeypatch.setattr(_CacheLocator, "ensure_cache_path", refuse)
    add = kernel(Int, Int, returns=Int)(load("ssd.example"))
    assert add.stats.cache_hits
    assert add(1, 2) == 3
    assert len(times) == 1  # that of the kernel which was compiled
    with pytest.raises(UserError, match="set the environment variable NUMBA_CACHE_DIR to a folder"):
        kernel(Float, Float, returns=Float)(load("ssd.example"))
    with pytest.raises(RuntimeError, match="no locator"):  # Other packages are not affected.
        njit(cache=True)(load("other"))


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path):
    (tmp_path / "__pycache__").write_text("a file in the folder's place")
    drop_stale_kernels(tmp_path)


@kernel(Longs, Tokens, Int, returns=types.UniTuple(Int, 3))
def bits_and_equal_words(numbers, words, index):
    """Return the bit length of a number, the mask of the 32 words that equal one of them, and their number."""
    same = equal_words(words.ctypes.data, words[index])
    return bit_length(numbers[index]), np.int64(same), count_bits(same)


def test_bits_are_counted_and_words_compared():
    rng = np.random.default_rng(0)
    numbers = np.array([0, 1, 2, 3, 4, 255, 256, (1 << 62) - 1, 1 << 62, *rng.integers(0, 1 << 62, 23)])
    words = rng.choice(np.array([0, 1, 5, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF], np.uint32), 32)
    for index in range(32):
        alike = [place for place in range(32) if words[place] == words[index]]
        expected = (int(numbers[index]).bit_length(), sum(1 << place for place in alike), len(alike))
        assert bits_and_equal_words(numbers, words, index) == expected


@kernel(TokensOut, Longs, Int, returns=Nothing)
def move_one_by_one(lock, counts, times):
    """Move a count from the first place to the last by way of all others, a number of times."""
    for _ in range(times):
        acquire(lock)
        for place in range(len(counts) - 1):
            moved = counts[place]
            counts[place] -= moved
            counts[place + 1] += moved
        counts[0] = counts[-1] + 1
        counts[-1] = 0
        release(lock)


def test_one_thread_at_a_time_holds_a_lock():
    lock, counts, times = np.zeros(1, np.uint32), np.zeros(64, np.int64), 1_000_000
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: move_one_by_one(lock, counts, times), range(4)))
    assert counts.tolist() == [4 * times, *[0] * 63]
    assert lock[0] == 0
