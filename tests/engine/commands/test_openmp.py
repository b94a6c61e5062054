import subprocess
import sys

import pytest

from engine.commands import openmp
from engine.commands.openmp import NO_SPINNING, limit_spinning

CHECK_ORDER = """
import sys
import engine.commands.main as command
command.limit_spinning = lambda environment: print("torch" in sys.modules)
sys.argv = ["ssd-engine", "generate", "--help"]
command.main()
"""


def stat(ticks, idle, busy):
    """/proc/stat with two usable processors, 1 and 3, and others; half of the idle ticks waited for a device."""
    rows = (f"cpu{number} {busy} 0 0 {idle // 2} {idle // 2} 0 0 0 0 0" for number in (1, 3))
    return "\n".join([f"cpu  9 9 9 {ticks} 9 9 9 9 0 0", *rows, f"cpu10 {ticks} 9 9 9 9 9 9 9 9 9", "intr 1 2 3\n"])


@pytest.mark.parametrize(
    ("idle", "busy", "environment", "limits"),
    [
        (10, 0, {}, False),
        (8, 2, {}, False),  # Background load is not contention.
        (6, 4, {}, True),
        (0, 10, {}, True),
        (0, 0, {}, False),  # no tick
        (0, 10, {"OMP_NUM_THREADS": "1"}, False),
        (0, 10, {"OMP_NUM_THREADS": "2"}, True),
        (0, 10, {"OMP_NUM_THREADS": "all"}, True),
        (0, 10, {"OMP_NUM_THREADS": "2,1"}, True),
        (10, 0, {"OMP_NUM_THREADS": "3"}, True),
        (0, 10, {"GOMP_SPINCOUNT": "active"}, False),
        (0, 10, {"OMP_WAIT_POLICY": "active"}, False),
    ],
)
def test_threads_do_not_spin_if_they_exceed_the_free_processors(monkeypatch, idle, busy, environment, limits):
    monkeypatch.setattr(openmp, "usable_processors", lambda: {1, 3})
    monkeypatch.setattr(openmp.time, "sleep", lambda _: None)
    stats = iter([stat(7, 1000, 500), stat(9000, 1000 + idle, 500 + busy)])
    chosen = dict(environment)
    limit_spinning(chosen, lambda: next(stats))
    assert chosen == environment | ({"GOMP_SPINCOUNT": NO_SPINNING} if limits else {})


def test_the_command_chooses_before_torch_is_imported():
    done = subprocess.run([sys.executable, "-c", CHECK_ORDER], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False\n")
