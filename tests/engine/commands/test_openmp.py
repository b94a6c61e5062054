import os
import subprocess
import sys

import pytest

from engine.commands.main import SPIN_COUNT, limit_spinning

PRINT_SPIN_COUNT = """
import os, sys
import engine.commands.main as command
assert "torch" not in sys.modules
command.cli = lambda: print(os.environ["GOMP_SPINCOUNT"])
command.main()
"""


def test_the_spin_count_is_limited_by_default():
    environment = {"OMP_NUM_THREADS": "2"}
    limit_spinning(environment)
    assert environment == {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": SPIN_COUNT}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_the_users_choice_is_kept(name):
    environment = {name: "active"}
    limit_spinning(environment)
    assert environment == {name: "active"}


def test_the_command_limits_spinning_before_torch_is_imported():
    chosen = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", PRINT_SPIN_COUNT], env=chosen, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == SPIN_COUNT
