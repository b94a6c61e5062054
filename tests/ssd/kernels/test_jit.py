"""The functions that are written in LLVM IR."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numba import types

from ssd.kernels.jit import (
    Int,
    Longs,
    Nothing,
    Tokens,
    TokensOut,
    acquire,
    bit_length,
    count_bits,
    equal_words,
    kernel,
    release,
)


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
