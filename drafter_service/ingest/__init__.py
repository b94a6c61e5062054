"""Warm-up: logs and text of many kinds become documents of token ids, for a corpus or a running service to learn."""
