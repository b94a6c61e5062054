"""Progress of requests on a terminal and without one."""

import io

from rich.console import Console

from engine.commands import progress
from engine.commands.progress import LongProgress


def shown(*, is_terminal):
    """Return what is printed while three of four requests end."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=120)
    with LongProgress(console, 4) as requests:
        requests.advance(1, "ngram")
        requests.advance(2, "[ssd]")
    return file.getvalue()


def test_lines_are_printed_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    assert shown(is_terminal=False) == "1 of 4 requests: ngram\n3 of 4 requests: [ssd]\n"


def test_short_runs_print_no_lines():
    assert shown(is_terminal=False) == ""


def test_a_terminal_shows_a_bar(monkeypatch):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    bar = shown(is_terminal=True)
    assert "3/4" in bar
    assert "[ssd]" in bar
    assert "of 4 requests" not in bar
