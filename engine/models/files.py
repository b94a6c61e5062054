"""Read JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ssd.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}; is it a Hugging Face model folder?") from None
    except (OSError, ValueError, RecursionError) as problem:
        raise UserError(f"{path} cannot be read ({problem}); download or copy it again") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} is not a JSON object; download or copy it again")
    return fields


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return the token ids of a field that contains none, one or a list."""
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)
