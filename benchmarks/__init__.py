"""One module per question; each prints one JSON document as its last line."""

import sys
from types import TracebackType


def _report_interruption(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
    """Print an interruption (Ctrl-C) as one line; the shell then sees exit status 130. Other exceptions are printed as
    usual."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, problem, trace)


sys.excepthook = _report_interruption
