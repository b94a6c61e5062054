"""Where the model that comes with the project lies."""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
SHIPPED_MODEL = ASSETS / "stdlib-7m"
"""The small model that comes with the project."""
PROMPTS_FILE = "prompts.jsonl"
"""In its folder: held-out functions to complete."""
