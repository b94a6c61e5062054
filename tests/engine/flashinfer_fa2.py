"""FlashInfer's FA2 over paged keys in slow Python: the planner's arrays, tiles, partial results, merge.

After flashinfer 0.7.2: `PrefillSplitQOKVIndptr` and `PrefillPlanImpl` in scheduler.cuh, `FA2DetermineCtaTileQ` in
utils.cuh, `BatchPrefillWithPagedKVCacheDevice` in prefill.cuh, `PersistentVariableLengthMergeStatesKernel` in
cascade.cuh. Arguments are those of the compiled module. Results of tiles that were never written are NaN.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

PROCESSORS = 132
LEAST_CHUNK = 128
CAUSAL, CUSTOM = 1, 2


def cta_tile(packed, head_dim):
    if packed > 64 and head_dim < 256:
        return 128
    return 64 if packed > 16 else 16


def ceil_div(left, right):
    return -(-left // right)


class Allocator:
    """Allocates offsets in a workspace of limited size."""

    def __init__(self, size):
        self.size, self.used = size, 0

    def take(self, size, alignment=16):
        offset = ceil_div(self.used, alignment) * alignment
        self.used = offset + size
        if self.used > self.size:
            raise RuntimeError("Buffer overflow when allocating memory")
        return offset


def split(queries, pages, page_size, group, head_dim, tiles_at_most, *, graph, rows, uniform):
    """Return (whether keys are split, pages per chunk, queries per tile, number of tiles in a graph)."""
    packed = [length * group for length in queries]
    if graph and uniform:
        assert set(queries) == {uniform}
        tile = cta_tile(uniform * group, head_dim)
        tiles = len(queries) * ceil_div(uniform * group, tile)
    elif graph:
        tile = cta_tile((rows - len(queries) + 1) * group, head_dim)
        tiles = ceil_div(rows * group, tile) + len(queries) - 1
    else:
        tile = cta_tile(sum(packed) // len(packed), head_dim)
        tiles = 0
    low, high = max(LEAST_CHUNK // page_size, 1), max(1, *pages)
    while low < high:
        middle = (low + high) // 2
        needed = sum(ceil_div(p, tile) * ceil_div(max(n, 1), middle) for p, n in zip(packed, pages, strict=True))
        low, high = (middle + 1, high) if needed > tiles_at_most else (low, middle)
    return graph or low < max(1, *pages), low, tile, max(tiles_at_most, tiles)


def plan(
    floats, integers, pinned, qo, kv, lengths, rows, batch, heads, kv_heads, page_size, graph, head_dim, value_dim,
    causal, window, fixed_split, disable_split, colocated, uniform,
):  # fmt: skip
    assert (head_dim, fixed_split, disable_split, colocated) == (value_dim, -1, disable_split and not graph, 0)
    assert pinned.numel() == integers.numel()
    for array in (qo, kv, lengths):
        assert array.device.type == "cpu"
        assert array.dtype == torch.int32
    group = heads // kv_heads
    queries, pages = qo.diff().tolist(), kv.diff().tolist()
    assert len(queries) == len(pages) == batch
    splits, chunk, tile, tiles = split(
        queries, pages, page_size, group, head_dim, 2 * PROCESSORS // kv_heads, graph=graph, rows=rows, uniform=uniform
    )
    if disable_split:
        splits, chunk = False, max(1, *pages)
    counts = [ceil_div(max(length, 1), chunk) for length in pages]
    listed = [
        (request, of_queries, of_keys)
        for request, length in enumerate(queries)
        for of_queries in range(ceil_div(length * group, tile))
        for of_keys in range(counts[request])
    ]
    tiles = tiles if graph else len(listed)
    assert len(listed) <= tiles
    merged = [0]
    for length, parts in zip(queries, counts, strict=True):
        merged += [merged[-1] + parts * (row + 1) for row in range(length)]
    firsts = [merged[end] for end in qo.tolist()]
    numbers, numbers_f = Allocator(integers.numel()), Allocator(floats.numel() * floats.itemsize)
    info = [0] * 15
    info[0], info[1], info[3], info[13], info[14] = tiles, rows, tile, int(graph), int(splits)
    integers.fill_(0x5A)  # unwritten memory is arbitrary

    def write(field, values, alignment=16, dtype=torch.int32, room=None):
        size = torch.empty(0, dtype=dtype).itemsize
        info[field] = numbers.take(size * max(len(values), room or 0), alignment)
        place = integers[info[field] : info[field] + size * len(values)].view(dtype)
        place.copy_(torch.tensor(values, dtype=dtype))

    for field, column in ((4, 0), (5, 1), (6, 2)):
        write(field, [entry[column] for entry in listed], room=tiles)
    write(8, firsts)
    write(9, [chunk * page_size], 1)
    if graph:
        write(2, [int(qo[-1])])
    if splits:
        partial = ceil_div(tiles * tile, group)
        assert firsts[-1] <= partial
        info[10] = numbers_f.take(heads * partial * head_dim * 4)
        info[11] = numbers_f.take(heads * partial * 4)
        write(7, merged, room=rows + 1)
    if graph:
        write(12, [index < len(listed) for index in range(tiles)], dtype=torch.bool)
    return info


def paged_run(
    floats, integers, info, query, keys, values, qo, kv, indices, last, out, lse, mask_mode, layout, window, pdl, *rest
):
    assert (layout, window) == (0, -1)
    assert query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    assert out.is_contiguous()
    heads, page_size, kv_heads = query.shape[1], keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    tiles, tile, graph, splits = info[0], info[3], info[13], info[14]

    def read(field, count, dtype=torch.int32):
        size = torch.empty(0, dtype=dtype).itemsize
        return integers[info[field] : info[field] + size * count].view(dtype).tolist()

    requests, of_queries, of_keys = (read(field, tiles) for field in (4, 5, 6))
    firsts, (size,) = read(8, len(qo)), read(9, 1)
    valid = read(12, tiles, torch.bool) if graph else [True] * tiles
    rows = ceil_div(tiles * tile, group) if splits else len(query)
    partial = torch.full((rows, heads, query.shape[2]), math.nan)
    weights = torch.full((rows, heads), math.nan)
    head = torch.arange(heads) % group
    for request, query_tile, chunk, runs in zip(requests, of_queries, of_keys, valid, strict=True):
        if not runs:
            continue
        begin, length = int(qo[request]), int(qo[request + 1] - qo[request])
        key_count = int((kv[request + 1] - kv[request] - 1) * page_size + last[request])
        assert key_count >= 0
        entries = torch.arange(ceil_div(key_count, page_size)) + kv[request]
        # After the last table it reads page 0.
        pages = torch.where(entries < kv[-1], indices[entries.clamp(max=len(indices) - 1)], 0).long()
        # The offset of a result depends on the number of chunks of the length that is read.
        chunks = ceil_div(max(key_count, 1), size) if splits else 1
        start, end = (min((chunk + more) * size, key_count) for more in (0, 1)) if splits else (0, key_count)
        key, value = (
            cached[pages].flatten(0, 1)[start:end].float().repeat_interleave(group, 1) for cached in (keys, values)
        )
        row = torch.arange(length)
        scores = torch.einsum("nhd,lhd->nhl", query[begin : begin + length].float(), key)
        scores *= math.log2(math.e) / math.sqrt(query.shape[2])
        if mask_mode == CAUSAL:
            hidden = torch.arange(start, end) + length > key_count + row[:, None]
            scores = scores.masked_fill(hidden[:, None], -math.inf)
        if mask_mode == CUSTOM:
            flat, firsts_of_masks = rest[:2]
            own = flat[int(firsts_of_masks[request]) :][: length * key_count].view(length, key_count)
            scores = scores.masked_fill(~own[:, None, start:end], -math.inf)
        weight = torch.logsumexp(scores * math.log(2), -1) / math.log(2)
        attended = torch.einsum("nhl,lhd->nhd", torch.exp2(scores - weight.clamp(min=-1e30)[..., None]), value)
        at = firsts[request] + (chunk if splits else 0) + row * chunks
        packed = row[:, None] * group + head
        mine = (packed >= query_tile * tile) & (packed < (query_tile + 1) * tile)
        places, which = torch.nonzero(mine, as_tuple=True)
        partial[at[places], which] = attended[places, which]
        weights[at[places], which] = weight[places, which]
    if splits:
        merged = read(7, info[1] + 1)
        parts = [merge(partial[a:b], weights[a:b]) for a, b in pairwise(merged)]
        partial, weights = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    out.copy_(partial)
    if lse is not None:
        lse.copy_(weights)


def ragged_run(floats, integers, info, query, key, value, qo, kv, out, lse, mask_mode, layout, window, pdl, *rest):
    """Run with each key as a page."""
    lengths = torch.ones(len(kv) - 1, dtype=torch.int32)
    paged_run(
        floats, integers, info, query, key[:, None], value[:, None], qo, kv, torch.arange(len(key)), lengths, out, lse,
        mask_mode, layout, window, pdl, *rest,
    )  # fmt: skip


def merge(partial, weights):
    most = weights.amax(0).clamp(min=-1e30)
    shares = torch.exp2(weights - most)
    total = shares.sum(0)
    return (partial * (shares / total)[..., None]).sum(0), most + torch.log2(total)
