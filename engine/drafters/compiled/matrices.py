"""Products with matrices of 8-bit weights.

A matrix is divided into blocks of `BLOCK` outputs, and the weights of a block are stored input by input. So the inner
loop adds a few inputs to all outputs of a block, whose sums stay in the first-level cache, and reads the weights in
order. Weights are converted to float32 in registers; inputs are not rounded.
"""

from __future__ import annotations

import numpy as np

from ssd.kernels.jit import vectorized

BLOCK = 512
"""Number of outputs of a block. Among sizes from 128 to 1024, it was the fastest or close to it with 1 and 16 rows."""

# Columns of a table of matrices: places in the arrays of weights and of floats, and sizes. A bias of -1: none.
WEIGHTS, SCALES, BIAS, INPUTS, OUTPUTS = range(5)
COLUMNS = 5


def blocks_of(weight: np.ndarray) -> np.ndarray:
    """Return the weights of a matrix, int8 [out, in], in the order in which they are read, int8 [out * in]."""
    parts = [weight[first : first + BLOCK].T.ravel() for first in range(0, len(weight), BLOCK)]
    return np.concatenate(parts)


@vectorized
def multiply(weights, floats, matrix, rows, out):
    """Write the products of rows, float32 [n, in], with a matrix to `out`, float32 [n, out].

    weights: int8. floats: float32, scales of the outputs and biases. matrix: int64 [COLUMNS].
    """
    inputs, outputs, scales, bias = matrix[INPUTS], matrix[OUTPUTS], matrix[SCALES], matrix[BIAS]
    for first in range(0, outputs, BLOCK):
        size = min(BLOCK, outputs - first)
        begin = matrix[WEIGHTS] + first * inputs
        block = weights[begin : begin + size * inputs]
        end, fours = first + size, len(rows) // 4 * 4
        for row in range(0, fours, 4):
            # Rows are passed one by one: numba knows that each of them is contiguous, but not those of a slice.
            _add_to_four(
                block, rows[row], rows[row + 1], rows[row + 2], rows[row + 3],
                out[row, first:end], out[row + 1, first:end], out[row + 2, first:end], out[row + 3, first:end],
            )  # fmt: skip
        for row in range(fours, len(rows)):
            _add_to_one(block, rows[row], out[row, first:end])
    for row in range(len(rows)):
        sums = out[row]
        for output in range(outputs):
            sums[output] *= floats[scales + output]
        if bias >= 0:
            for output in range(outputs):
                sums[output] += floats[bias + output]


@vectorized
def _add_to_one(block, row, sums):
    """Write the products of one row, float32 [in], with a block to `sums`, float32 [size]."""
    size, inputs = len(sums), len(row)
    sums[:] = 0
    fours = inputs // 4 * 4
    for at in range(0, fours, 4):
        first = at * size
        one, two = block[first : first + size], block[first + size : first + 2 * size]
        three, four = block[first + 2 * size : first + 3 * size], block[first + 3 * size : first + 4 * size]
        a, b, c, d = row[at], row[at + 1], row[at + 2], row[at + 3]
        for output in range(size):
            sums[output] += (a * np.float32(one[output]) + b * np.float32(two[output])) + (
                c * np.float32(three[output]) + d * np.float32(four[output])
            )
    for at in range(fours, inputs):
        one, a = block[at * size : (at + 1) * size], row[at]
        for output in range(size):
            sums[output] += a * np.float32(one[output])


@vectorized
def _add_to_four(block, row_0, row_1, row_2, row_3, sums_0, sums_1, sums_2, sums_3):
    """Write the products of four rows, float32 [in] each, with a block to four sums, float32 [size] each.

    Each weight is converted once for all of them.
    """
    size, inputs = len(sums_0), len(row_0)
    sums_0[:], sums_1[:], sums_2[:], sums_3[:] = 0, 0, 0, 0
    fours = inputs // 4 * 4
    for at in range(0, fours, 4):
        first = at * size
        one, two = block[first : first + size], block[first + size : first + 2 * size]
        three, four = block[first + 2 * size : first + 3 * size], block[first + 3 * size : first + 4 * size]
        a_0, b_0, c_0, d_0 = row_0[at], row_0[at + 1], row_0[at + 2], row_0[at + 3]
        a_1, b_1, c_1, d_1 = row_1[at], row_1[at + 1], row_1[at + 2], row_1[at + 3]
        a_2, b_2, c_2, d_2 = row_2[at], row_2[at + 1], row_2[at + 2], row_2[at + 3]
        a_3, b_3, c_3, d_3 = row_3[at], row_3[at + 1], row_3[at + 2], row_3[at + 3]
        for output in range(size):
            a, b = np.float32(one[output]), np.float32(two[output])
            c, d = np.float32(three[output]), np.float32(four[output])
            sums_0[output] += (a_0 * a + b_0 * b) + (c_0 * c + d_0 * d)
            sums_1[output] += (a_1 * a + b_1 * b) + (c_1 * c + d_1 * d)
            sums_2[output] += (a_2 * a + b_2 * b) + (c_2 * c + d_2 * d)
            sums_3[output] += (a_3 * a + b_3 * b) + (c_3 * c + d_3 * d)
    for at in range(fours, inputs):
        one = block[at * size : (at + 1) * size]
        a_0, a_1, a_2, a_3 = row_0[at], row_1[at], row_2[at], row_3[at]
        for output in range(size):
            a = np.float32(one[output])
            sums_0[output] += a_0 * a
            sums_1[output] += a_1 * a
            sums_2[output] += a_2 * a
            sums_3[output] += a_3 * a
