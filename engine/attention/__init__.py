"""Attention over the paged KV cache: the interface, and one backend in PyTorch and one on FlashInfer."""
