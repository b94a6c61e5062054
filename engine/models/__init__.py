"""Families of models (`families.py`), decoders and their weights, model folders, tokenizers and chat templates."""
