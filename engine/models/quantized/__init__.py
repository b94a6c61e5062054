"""Quantized weights: their description in `config.json`, their storage in checkpoints, and layers that keep them."""
