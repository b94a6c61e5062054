"""Errors that are the user's to mend: command lines show them as one line and exit with code 2."""

from __future__ import annotations


class UserError(Exception):
    """Something the user gave cannot be used; the message says what and what to do."""
