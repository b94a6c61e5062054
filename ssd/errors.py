"""Errors that the user can fix; command lines print them as one line and exit with code 2."""

from __future__ import annotations


class UserError(Exception):
    """An unusable input; the message names it and says what to do."""
