"""Location of the model that ships with the project."""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
SHIPPED_MODEL = ASSETS / "stdlib-7m"
"""Folder of the shipped model."""
PROMPTS_FILE = "prompts.jsonl"
"""File in its folder with held-out functions to complete."""
SHIPPED_HEADS = ASSETS / "stdlib-7m-heads"
"""Folder with a folder of weights for each kind of drafter that was trained for the shipped model."""
