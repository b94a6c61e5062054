import subprocess
import sys

import pytest

from engine.commands import openmp
from engine.commands.openmp import NO_SPINNING, busy_processors, is_contended, limit_spinning

CHECK_ORDER = """
import sys
import engine.commands.main as command
command.limit_spinning = lambda environment: print("torch" in sys.modules)
sys.argv = ["ssd-engine", "generate", "--help"]
command.main()
"""


@pytest.mark.parametrize(("busy", "chosen"), [(0.2, {}), (2.0, {"GOMP_SPINCOUNT": NO_SPINNING})])
def test_threads_do_not_spin_beside_busy_processes(monkeypatch, busy, chosen):
    monkeypatch.setattr(openmp, "busy_processors", lambda: busy)
    monkeypatch.setattr(openmp, "usable_processors", lambda: {0, 1})
    environment = {}
    limit_spinning(environment)
    assert environment == chosen


@pytest.mark.parametrize(
    ("busy", "processors", "threads", "expected"),
    [
        (0.0, 2, 2, False),
        (0.5, 2, 2, False),
        (1.0, 2, 2, True),
        (2.0, 2, 1, False),
        (10.0, 64, 16, False),
        (60.0, 64, 16, True),
    ],
)
def test_processors_are_contended_if_threads_exceed_the_free_ones(busy, processors, threads, expected):
    assert is_contended(busy, processors, threads) is expected


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_users_choice_takes_precedence(monkeypatch, name):
    monkeypatch.setattr(openmp, "busy_processors", lambda: 100.0)
    environment = {name: "active"}
    limit_spinning(environment)
    assert environment == {name: "active"}


@pytest.mark.parametrize("threads", ["", "all", "2,1"])
def test_an_unusual_number_of_threads_counts_as_all_processors(monkeypatch, threads):
    monkeypatch.setattr(openmp, "busy_processors", lambda: 2.0)
    monkeypatch.setattr(openmp, "usable_processors", lambda: {0, 1})
    environment = {"OMP_NUM_THREADS": threads}
    limit_spinning(environment)
    assert environment["GOMP_SPINCOUNT"] == NO_SPINNING


def test_the_load_is_the_share_of_ticks_of_usable_processors_that_are_not_idle(monkeypatch):
    monkeypatch.setattr(openmp, "usable_processors", lambda: {1, 3})
    rest = "cpu10 9 9 9 9 9 9 9 9 9 9\nintr 1 2 3\n"
    first = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu1 40 0 20 300 20 0 0 0 0 0\ncpu3 60 0 30 500 30 0 0 0 0 0\n"
    second = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu1 45 1 21 302 20 1 0 0 0 0\ncpu3 65 0 31 503 31 0 0 0 0 0\n"
    stats, waits = iter([first + rest, second + rest]), []
    assert busy_processors(lambda: next(stats), waits.append) == pytest.approx(2 * 14 / 20)
    assert waits == [openmp.WINDOW_S]
    assert busy_processors(lambda: first, waits.append) == 0.0


def test_the_command_chooses_before_torch_is_imported():
    done = subprocess.run([sys.executable, "-c", CHECK_ORDER], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False\n")
