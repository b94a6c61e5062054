"""Ctrl-C in a benchmark."""

import signal
import subprocess
import sys


def test_an_interruption_is_one_line_and_other_exceptions_are_shown():
    def run(statement):
        return subprocess.run([sys.executable, "-c", f"import benchmarks; {statement}"], capture_output=True, text=True)

    interrupted = run("raise KeyboardInterrupt")
    assert (interrupted.returncode, interrupted.stderr) == (-signal.SIGINT, "interrupted\n")  # 130 for a shell
    assert run("1 / 0").stderr.endswith("ZeroDivisionError: division by zero\n")
