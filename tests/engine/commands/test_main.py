"""The command `ssd-engine`."""

import subprocess
import sys


def test_help_imports_nothing_heavy():
    """The help page imports neither torch nor numba."""
    script = (
        "import sys; from click.testing import CliRunner; from engine.commands.main import cli;"
        "result = CliRunner().invoke(cli, ['--help']); assert result.exit_code == 0, result.output;"
        "assert not {'numba', 'torch', 'grpc', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
