"""Decoders, their configurations and operations, model folders, tokenizers and chat templates."""
