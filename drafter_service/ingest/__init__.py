"""Warm-up: convert logs and text of many formats to documents of token ids, and add them to a corpus or service."""
