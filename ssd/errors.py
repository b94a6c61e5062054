"""Errors that the user can fix; command lines print them as one line and exit with code 2."""

from __future__ import annotations


class UserError(Exception):
    """An input that cannot be used; the message says which, and what to do."""
