"""The parts of FlashInfer that the engine uses, in slow PyTorch on the CPU, with FlashInfer's names of arguments.

Tests run this twin on the CPU and the library itself on a GPU (`library_of`).
Arrays are read like in its kernels: lengths are sums over pages, slots are looked up in a page table, and CUDA graphs
run tile by tile (`flashinfer_fa2.py`). Arguments that kernels overwrite are overwritten, and arguments that kernels
refuse or would misread are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.engine import flashinfer_fa2 as fa2


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


INT32 = torch.int32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Accepted dtypes. Tests on the CPU use float32, which the library itself does not support."""


def check_array(array, *, size=None, dtypes=(INT32,)):
    """Check the requirements of kernels for an array of numbers."""
    assert array.dtype in dtypes
    assert array.ndim == 1
    assert array.is_contiguous()
    assert size is None or len(array) == size


def check_heads(*tensors):
    """Check the requirements of kernels for heads: only the last dimension must be contiguous."""
    for tensor in tensors:
        assert tensor.ndim == 3
        assert tensor.stride(-1) == 1
        assert len(tensor) == len(tensors[0])


class Planned:
    """Checks that a run matches its plan."""

    def plan_for(self, heads, kv_heads, head_dim, page_size, q_data_type, kv_data_type, rows):
        assert heads % kv_heads == 0
        assert head_dim in (64, 128, 256)
        self.planned = heads, kv_heads, head_dim, page_size, q_data_type, kv_data_type, rows

    def check_run(self, query, keys, out=None):
        heads, kv_heads, head_dim, page_size, q_data_type, kv_data_type, rows = self.planned
        check_heads(query)
        assert (query.dtype, keys.dtype) == (q_data_type, kv_data_type)
        assert query.shape == (rows, heads, head_dim)
        assert page_size is None or keys.shape[1:] == (2, page_size, kv_heads, head_dim)
        if out is not None:
            assert (out.shape, out.dtype) == (query.shape, query.dtype)
            assert out.is_contiguous()


class PagedPrefill(Planned):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        *,
        backend,
    ):
        assert (kv_layout, backend) == ("NHD", "fa2")
        buffers = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        assert all((buffer is not None) == use_cuda_graph for buffer in buffers)
        self.is_graph = use_cuda_graph
        if use_cuda_graph:
            sequences = len(qo_indptr_buf) - 1
            for buffer, size in zip(buffers, (sequences + 1, sequences + 1, None, sequences), strict=True):
                check_array(buffer, size=size)
            self.buffers = buffers
            self.rows = None
        self.reset_workspace_buffer(float_workspace_buffer, torch.empty(8 << 20, dtype=torch.uint8))

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert int_workspace_buffer.dtype == torch.uint8
        self.workspaces = float_workspace_buffer, int_workspace_buffer

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        q_data_type=torch.float16,
        kv_data_type=None,
        uniform_q_len=None,
    ):
        qo, indptr, indices, last = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        pages = None if self.is_graph else int(indptr[-1])
        for array, size in ((qo, None), (indptr, len(qo)), (indices, pages), (last, len(qo) - 1)):
            check_array(array, size=size)
        for array in (qo, indptr, last):
            assert array.device.type == "cpu"
        counts = indptr.diff()
        assert (counts > 0).all()
        self.plan_for(num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_data_type, kv_data_type, int(qo[-1]))
        lengths = (counts - 1) * page_size + last
        if self.is_graph:
            assert causal
            self.plan_graph(qo, indptr, indices, last, lengths.int(), uniform_q_len)
            return
        self.queries, self.keys = qo.diff().tolist(), lengths.tolist()
        assert min(self.keys) >= 0
        self.tables = indices.split(counts.tolist())
        shapes = list(zip(self.queries, self.keys, strict=True))
        if causal:
            self.masks = [torch.ones(n, m, dtype=torch.bool).tril(m - n) for n, m in shapes]
        else:
            self.masks = [torch.ones(n, m, dtype=torch.bool) for n, m in shapes]

    def plan_graph(self, qo, indptr, indices, last, lengths, uniform_q_len):
        for buffer, array in zip(self.buffers, (qo, indptr, indices, last), strict=True):
            buffer[: len(array)].copy_(array)
            assert array is indices or len(array) == len(buffer)
        heads, kv_heads, head_dim, page_size, *_, rows = self.planned
        assert self.rows in (None, rows)
        self.rows = rows
        before = getattr(self, "_plan_info", None)
        self._plan_info = fa2.plan(
            *self.workspaces, self.workspaces[1], qo, indptr, lengths, rows, len(last), heads, kv_heads, page_size,
            True, head_dim, head_dim, True, -1, -1, False, 0, uniform_q_len or 0,
        )  # fmt: skip
        # A captured graph keeps the plan of its capture.
        assert before in (None, self._plan_info)

    def run(self, q, paged_kv_cache, *, out=None, return_lse=False):
        self.check_run(q, paged_kv_cache, out)
        if self.is_graph:
            assert not return_lse
            out = torch.empty_like(q) if out is None else out
            caches = paged_kv_cache.unbind(dim=1)
            fa2.paged_run(*self.workspaces, self._plan_info, q, *caches, *self.buffers, out, None, 1, 0, -1, False)
            return out
        rows = q.split(self.queries)
        parts = zip(rows, self.tables, self.keys, self.masks, strict=True)
        answer = joined(
            [attention(own, *cached(paged_kv_cache, pages, keys), mask) for own, pages, keys, mask in parts], return_lse
        )
        return answer if out is None else out.copy_(answer)


class RaggedPrefill(Planned):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend):
        assert (kv_layout, backend) == ("NHD", "fa2")

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        *,
        custom_mask,
        q_data_type,
        kv_data_type,
        disable_split_kv,
    ):
        assert disable_split_kv
        assert custom_mask.dtype == torch.bool
        for array in (qo_indptr, kv_indptr):
            check_array(array, size=len(qo_indptr))
            assert array.device.type == "cpu"
        self.plan_for(num_qo_heads, num_kv_heads, head_dim_qk, None, q_data_type, kv_data_type, int(qo_indptr[-1]))
        self.queries, self.keys = ((array[1:] - array[:-1]).tolist() for array in (qo_indptr, kv_indptr))
        self.masks = masks_of(custom_mask, list(zip(self.queries, self.keys, strict=True)))

    def run(self, q, k, v, *, return_lse=False):
        self.check_run(q, k)
        check_heads(k, v)
        parts = zip(q.split(self.queries), k.split(self.keys), v.split(self.keys), self.masks, strict=True)
        return joined([attention(*part) for part in parts], return_lse)


def merge_state(v_a, s_a, v_b, s_b):
    assert all(tensor.is_contiguous() for tensor in (v_a, s_a, v_b, s_b))
    assert v_a.dtype == v_b.dtype
    assert s_a.dtype == s_b.dtype == torch.float32
    assert v_a.shape == v_b.shape
    assert s_a.shape == s_b.shape == v_a.shape[:2]
    shares = torch.softmax(torch.stack((s_a, s_b)) * math.log(2), 0)[..., None]
    return (v_a * shares[0] + v_b * shares[1]).to(v_a.dtype), torch.logaddexp2(s_a, s_b)


def append_paged_kv_cache(
    append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len
):
    check_heads(append_key, append_value)
    assert append_key.dtype == append_value.dtype == paged_kv_cache.dtype
    assert append_key.shape[1:] == append_value.shape[1:] == paged_kv_cache.shape[3:]
    assert append_key.shape[2] in (64, 128, 256, 512)
    for array, size in ((batch_indices, len(append_key)), (positions, len(append_key))):
        check_array(array, size=size)
    for array, size in ((kv_indices, None), (kv_indptr, len(kv_last_page_len) + 1), (kv_last_page_len, None)):
        check_array(array, size=size)
    page_size = paged_kv_cache.shape[2]
    pages = kv_indices[kv_indptr[batch_indices] + positions // page_size]
    paged_kv_cache[pages, 0, positions % page_size] = append_key
    paged_kv_cache[pages, 1, positions % page_size] = append_value


def rmsnorm(
    input,  # noqa: A002
    weight,
    eps=1e-6,
    out=None,
):
    """Normalize [N, size] or [N, heads, size]; kernels read a weight as if it had the input's dtype."""
    assert input.ndim in (2, 3)
    assert input.stride(-1) == 1
    assert input.dtype == weight.dtype
    assert weight.shape == input.shape[-1:]
    wide = input.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(input.dtype)
    if out is None:
        return normed
    assert (out.shape, out.dtype, out.stride(-1)) == (input.shape, input.dtype, 1)
    return out.copy_(normed)


def fused_add_rmsnorm(
    input,  # noqa: A002
    residual,
    weight,
    eps=1e-6,
):
    assert input.ndim == 2
    assert (input.shape, input.dtype) == (residual.shape, residual.dtype)
    assert residual.stride(-1) == 1
    residual += input
    input.copy_(rmsnorm(residual, weight, eps))


def apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache):
    check_array(positions, size=len(query), dtypes=(torch.int32, torch.int64))
    assert cos_sin_cache.dtype == torch.float32
    assert cos_sin_cache.is_contiguous()
    assert cos_sin_cache.shape[1] in (16, 32, 64, 128, 256)
    assert query.dtype == key.dtype
    assert query.dtype in DTYPES
    query, key = (heads.view(len(heads), -1, head_size) for heads in (query, key))
    check_heads(query, key)
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, -1)
    for heads in (query, key):
        left, right = heads.float().chunk(2, -1)
        heads.copy_(torch.cat((left * cos - right * sin, right * cos + left * sin), -1))


def silu_and_mul(input: Tensor):  # noqa: A002
    assert input.is_contiguous()
    gate, up = input.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


TWIN = SimpleNamespace(
    BatchPrefillWithPagedKVCacheWrapper=PagedPrefill,
    BatchPrefillWithRaggedKVCacheWrapper=RaggedPrefill,
    merge_state=merge_state,
    append_paged_kv_cache=append_paged_kv_cache,
    rmsnorm=rmsnorm,
    fused_add_rmsnorm=fused_add_rmsnorm,
    apply_rope_with_cos_sin_cache_inplace=apply_rope_with_cos_sin_cache_inplace,
    silu_and_mul=silu_and_mul,
)


LIBRARIES = ["twin", pytest.param("library", marks=pytest.mark.gpu)]


@dataclass
class Library:
    """Device and dtype on which FlashInfer or its twin runs."""

    device: str
    dtype: torch.dtype
    tolerance: float
    """Absolute and relative tolerance of attention."""


@contextmanager
def library_of(name: str) -> Iterator[Library]:
    """Yield one of `LIBRARIES`; the twin replaces the library until the context ends."""
    if name == "library":
        pytest.importorskip("flashinfer")
        yield Library("cuda", torch.bfloat16, 2e-2)
        return
    with pytest.MonkeyPatch.context() as patch:
        for module in ("engine.attention.flashinfer", "engine.attention.backend"):
            patch.setattr(f"{module}.flashinfer", lambda: TWIN)
        patch.setattr("engine.attention.backend._obstacle", lambda *_: None)
        patch.setattr("engine.attention.flashinfer.WORKSPACE_BYTES", 1)
        yield Library("cpu", torch.float32, 2e-5)
