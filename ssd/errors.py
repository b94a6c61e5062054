"""Errors that the user can fix, and how command lines report them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """An unusable input; the message names it and says what to do."""


def missing_extra(feature: str, extra: str) -> UserError:
    """Return the error for packages that are not installed.

    feature: the feature and the packages that it needs, such as "the shared log needs redis-py". extra: the extra of
    this distribution that contains them.
    """
    return UserError(f"{feature}; run in the source folder of ssd-drafter: pip install '.[{extra}]'")


@contextmanager
def exit_with_message() -> Iterator[None]:
    """Print a UserError or an interruption (Ctrl-C) as one line on stderr; exit with status 2 or 130 (128 + SIGINT)."""
    try:
        yield
    except UserError as problem:
        message, status = f"error: {problem}", 2
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    else:
        return
    print(message, file=sys.stderr)
    sys.exit(status)
