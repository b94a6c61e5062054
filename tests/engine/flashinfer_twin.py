"""What we use of FlashInfer, in slow PyTorch on any device.

Arrays are read the way its kernels read them: lengths are sums over pages, slots go through a page table, masks are
read bit by bit. Whatever a kernel overwrites is overwritten here too.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor


def attention(query, key, value, mask):
    """[n, H, d], [l, G, d] twice, bool [n, l] -> [n, H, d], base-2 log-sum-exp [n, H]."""
    sharing = query.shape[1] // key.shape[1]
    key, value = (tensor.float().repeat_interleave(sharing, 1) for tensor in (key, value))
    scores = torch.einsum("nhd,lhd->hnl", query.float(), key) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~mask, float("-inf"))
    weight = torch.logsumexp(scores, -1)
    shares = torch.exp(scores - weight[..., None]) if scores.shape[-1] else scores
    return torch.einsum("hnl,lhd->nhd", shares, value).to(query.dtype), (weight / math.log(2)).T


def cached(cache, pages, length):
    """The first `length` keys and values of a page table."""
    return (cache[pages.long(), kind].flatten(0, 1)[:length] for kind in (0, 1))


def masks_of(flat, shapes):
    return [part.view(shape) for part, shape in zip(flat.split([n * m for n, m in shapes]), shapes, strict=True)]


def joined(parts, return_lse):
    attended, weights = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return (attended, weights) if return_lse else attended


class PagedPrefill:
    def __init__(self, workspace, layout, *, backend, use_cuda_graph=False, **buffers):
        assert (layout, backend) == ("NHD", "fa2")
        assert bool(buffers) == use_cuda_graph
        self.buffers = {name.removesuffix("_buf"): buffer for name, buffer in buffers.items()}
        assert all(buffer.dtype == torch.int32 for buffer in self.buffers.values())

    def plan(
        self,
        qo,
        indptr,
        indices,
        last,
        heads,
        kv_heads,
        head_dim,
        page_size,
        *,
        causal=False,
        custom_mask=None,
        **types,
    ):
        for array in (qo, indptr, indices, last):
            assert array.dtype == torch.int32
            assert array.device.type == "cpu"
        assert types.keys() == {"q_data_type", "kv_data_type"}
        self.queries = (qo[1:] - qo[:-1]).tolist()
        self.keys = ((indptr[1:] - indptr[:-1] - 1) * page_size + last).tolist()
        self.tables = indices.split((indptr[1:] - indptr[:-1]).tolist())
        shapes = list(zip(self.queries, self.keys, strict=True))
        if self.buffers:
            assert causal
            self.plan_buffers(qo_indptr=qo, paged_kv_indptr=indptr, paged_kv_last_page_len=last, indices=indices)
            self.page_size = page_size
        if custom_mask is not None:
            self.masks = masks_of(custom_mask, shapes)
        elif causal:
            self.masks = [torch.ones(n, m, dtype=torch.bool).tril(m - n) for n, m in shapes]
        else:
            self.masks = [torch.ones(n, m, dtype=torch.bool) for n, m in shapes]

    def plan_buffers(self, *, indices, **arrays):
        for name, array in arrays.items():
            self.buffers[name].copy_(array)  # as many as the buffer has, no more and no fewer
        self.buffers["paged_kv_indices"][: len(indices)] = indices
        self.planned = self.keys

    def read_buffers(self):
        """Lengths and pages as they are now; no length may be beyond what was planned."""
        counts = self.buffers["paged_kv_indptr"].diff()
        self.keys = ((counts - 1) * self.page_size + self.buffers["paged_kv_last_page_len"]).tolist()
        assert all(keys <= most for keys, most in zip(self.keys, self.planned, strict=True))
        self.tables = self.buffers["paged_kv_indices"][: int(counts.sum())].split(counts.tolist())
        shapes = zip(self.queries, self.keys, strict=True)
        self.masks = [torch.ones(n, m, dtype=torch.bool).tril(m - n) for n, m in shapes]

    def run(self, query, cache, return_lse=False):
        if self.buffers:
            self.read_buffers()
        rows = query.split(self.queries)
        parts = zip(rows, self.tables, self.keys, self.masks, strict=True)
        return joined([attention(q, *cached(cache, pages, keys), mask) for q, pages, keys, mask in parts], return_lse)


class RaggedPrefill:
    def __init__(self, workspace, layout, *, backend):
        assert (layout, backend) == ("NHD", "fa2")

    def plan(self, qo, kv, heads, kv_heads, head_dim, *, custom_mask, q_data_type, kv_data_type, disable_split_kv):
        assert disable_split_kv
        self.queries, self.keys = ((array[1:] - array[:-1]).tolist() for array in (qo, kv))
        self.masks = masks_of(custom_mask, list(zip(self.queries, self.keys, strict=True)))

    def run(self, query, key, value, return_lse=False):
        parts = zip(query.split(self.queries), key.split(self.keys), value.split(self.keys), self.masks, strict=True)
        return joined([attention(*part) for part in parts], return_lse)


class PagedDecode(PagedPrefill):
    def __init__(self, workspace, layout, *, use_tensor_cores, backend):
        super().__init__(workspace, layout, backend=backend)

    def plan(self, indptr, *arrays, **types):
        super().plan(torch.arange(len(indptr), dtype=torch.int32), indptr, *arrays, causal=True, **types)


def merge_state(left, left_weight, right, right_weight):
    shares = torch.softmax(torch.stack((left_weight, right_weight)) * math.log(2), 0)[..., None]
    return (left * shares[0] + right * shares[1]).to(left.dtype), torch.logaddexp2(left_weight, right_weight)


def append_paged_kv_cache(key, value, sequences, positions, cache, indices, indptr, last):
    assert key.dtype == cache.dtype
    assert all(array.dtype == torch.int32 for array in (sequences, positions, indices, indptr, last))
    page_size = cache.shape[2]
    pages = indices[indptr[sequences] + positions // page_size]
    cache[pages, 0, positions % page_size] = key
    cache[pages, 1, positions % page_size] = value


def xqa(
    query,
    cache,
    workspace,
    tables,
    lengths,
    most,
    *,
    bmm1_scale,
    bmm2_scale,
    q_len_per_req,
    mask=None,
    q_cu_seq_lens=None,
):
    assert query.is_contiguous()
    assert bmm1_scale == query.shape[-1] ** -0.5
    assert bmm2_scale == 1
    assert most == lengths.max()
    starts = range(len(lengths) + 1) if q_cu_seq_lens is None else q_cu_seq_lens.tolist()
    parts = []
    for index, keys in enumerate(lengths.tolist()):
        rows = range(starts[index], starts[index + 1])
        assert len(rows) <= q_len_per_req
        sees = torch.ones(len(rows), keys, dtype=torch.bool)
        if mask is not None:
            assert mask.shape[1] == (q_len_per_req + 31) // 32 * 2
            words = mask[list(rows)].tolist()
            bits = [[words[i][j // 16] >> (j % 16) & 1 for j in range(len(rows))] for i in range(len(rows))]
            sees[:, keys - len(rows) :] = torch.tensor(bits, dtype=torch.bool)
        parts.append(attention(query[list(rows)], *cached(cache, tables[index], keys), sees))
    return joined(parts, return_lse=False)


def rmsnorm(hidden, weight, eps, out=None):
    wide = hidden.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(hidden.dtype)
    return normed if out is None else out.copy_(normed)


def fused_add_rmsnorm(hidden, residual, weight, eps):
    residual += hidden
    hidden.copy_(rmsnorm(residual, weight, eps))


def apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, table):
    assert table.dtype == torch.float32
    cos, sin = table[positions][:, None].chunk(2, -1)
    for heads in (query, key):
        assert heads.shape[-1] == head_size
        left, right = heads.float().chunk(2, -1)
        heads.copy_(torch.cat((left * cos - right * sin, right * cos + left * sin), -1))


def silu_and_mul(gate_up: Tensor):
    gate, up = gate_up.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


TWIN = SimpleNamespace(
    BatchPrefillWithPagedKVCacheWrapper=PagedPrefill,
    BatchPrefillWithRaggedKVCacheWrapper=RaggedPrefill,
    BatchDecodeWithPagedKVCacheWrapper=PagedDecode,
    decode=SimpleNamespace(xqa_batch_decode_with_kv_cache=xqa),
    merge_state=merge_state,
    append_paged_kv_cache=append_paged_kv_cache,
    rmsnorm=rmsnorm,
    fused_add_rmsnorm=fused_add_rmsnorm,
    apply_rope_with_cos_sin_cache_inplace=apply_rope_with_cos_sin_cache_inplace,
    silu_and_mul=silu_and_mul,
)
