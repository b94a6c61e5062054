"""The page at `/`: one file without a build step, which asks `/figures` for all that it shows."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).with_name("page.html")


def read_page() -> str:
    """The page's HTML."""
    return PAGE.read_text(encoding="utf-8")
