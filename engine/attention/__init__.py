"""Attention over the paged KV cache: the interface, and backends in PyTorch and on FlashInfer."""
