"""Measure the size of the base install and the start-up times of both commands.

    python -m benchmarks.startup [--rounds 5]

The base is installed from a wheel into an empty environment, with the package versions of this environment from pip's
cache or the registry. Printed are the size of each distribution in MB (10^6 bytes, compiled Python files included) and
the median time in seconds until `ssd-drafter serve` listens (base, kernels compiled), until `ssd-engine serve` answers
(this environment, shipped model), and until `ssd-engine --help` ends. The first start is not counted. The last line is
one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = "ssd-drafter"
PROBE = "click"
"""A small dependency that is used to check whether pip can download packages."""
SHOWN_MB = 2.0
TIMEOUT_S = 600.0


def build(folder: Path) -> None:
    """Build the sdist, and the wheel from it. Raises subprocess.CalledProcessError if that fails."""
    _run(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT))


class Environment:
    """An empty virtual environment with a wheel of this distribution, in `folder`."""

    def __init__(self, folder: Path, wheel: Path, python: str = sys.executable) -> None:
        """Install the wheel with what it needs. Raises subprocess.CalledProcessError if that fails."""
        self.folder = folder
        _run(python, "-m", "venv", "--without-pip", str(folder))
        self._constraints = folder / "constraints.txt"
        versions = {found.name: found.version.split("+")[0] for found in distributions() if found.name != NAME}
        self._constraints.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
        self.install(str(wheel))

    def install(self, *arguments: str) -> None:
        """Install further packages, in the versions of the running environment. Raises as the constructor."""
        install = ["install", "--no-compile", "--constraint", str(self._constraints)]
        _pip(*install, *arguments, python=self.folder / "bin" / "python")

    @property
    def packages(self) -> Path:
        """Folder that packages are installed in."""
        (folder,) = self.folder.glob("lib/python3.*/site-packages")
        return folder

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of a program of the environment."""
        return [str(self.folder / "bin" / arguments[0]), *arguments[1:]]

    def copy_kernels(self) -> None:
        """Copy the compiled kernels of this checkout; compiling them would take about a minute.

        numba caches a kernel beside its source and checks the source's modification time, so both are copied. Raises
        ValueError if the installed sources differ from the checkout's.
        """
        for source in sorted((ROOT / "ssd").rglob("*.py")):
            installed = self.packages / source.relative_to(ROOT)
            if installed.read_bytes() != source.read_bytes():
                raise ValueError(f"{installed} differs from {source}")
        shutil.copytree(ROOT / "ssd", self.packages / "ssd", dirs_exist_ok=True)

    def distributions(self) -> dict[str, float]:
        """Return the size of each installed distribution in MB, the largest first."""
        sizes = {
            found.name: sum(
                path.stat().st_size for file in found.files or () if (path := found.locate_file(file)).exists()
            )
            for found in distributions(path=[str(self.packages)])
        }
        return {name: size / 1e6 for name, size in sorted(sizes.items(), key=lambda item: -item[1])}


def can_install() -> bool:
    """Return whether pip can get packages, from its cache or a registry."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _pip("download", "--no-deps", "--retries", "0", "--dest", folder, PROBE)
        except subprocess.CalledProcessError:
            return False
    return True


def _pip(*arguments: str, python: Path | None = None) -> None:
    target = ["--python", str(python)] if python else []
    _run(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *target, *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)


def main() -> None:
    """Install, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder) / "dist")
        environment = Environment(Path(folder) / "environment", *Path(folder).glob("dist/*.whl"))
        subprocess.run(
            [environment.command("python")[0], "-m", "compileall", "-q", str(environment.packages)],
            stdout=subprocess.DEVNULL,
        )
        sizes = environment.distributions()
        total = sum(path.stat().st_size for path in environment.packages.rglob("*") if path.is_file()) / 1e6
        environment.copy_kernels()
        times = _start_up_times(environment, Path(folder), rounds)
    for name, size in sizes.items():
        if size >= SHOWN_MB:
            print(f"{name:<28} {size:>7.1f} MB")
    print(f"{'all, bytecode included':<28} {total:>7.1f} MB")
    for name, seconds in times.items():
        print(f"{name:<28} {seconds:>7.2f} s")
    print(json.dumps({"total_mb": total, "mb": sizes, "seconds": times}))


def _start_up_times(environment: Environment, folder: Path, rounds: int) -> dict[str, float]:
    bytecode = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    engine = [sys.executable, "-m", "engine.commands.main"]
    address = f"unix:{folder}/drafter.sock"
    port = _free_port()
    starts: dict[str, Callable[[], float]] = {
        "ssd-drafter serve": lambda: _until_line(
            environment.command("ssd-drafter", "serve", "--listen", address), bytecode, "listening"
        ),
        "ssd-engine serve": lambda: _until_line([*engine, "serve", "--port", str(port)], bytecode, "http://"),
        "ssd-engine --help": lambda: _until_line([*engine, "--help"], bytecode, None),
    }
    times: dict[str, list[float]] = {name: [] for name in starts}
    for number in range(rounds + 1):
        for name, start in starts.items():
            seconds = start()
            if number > 0:
                times[name].append(seconds)
    return {name: statistics.median(each) for name, each in times.items()}


def _until_line(command: list[str], environment: dict[str, str], expected: str | None) -> float:
    """Return the seconds until a command prints a line with `expected`, or until it ends if that is None."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        printed = []
        for line in process.stdout:
            printed.append(line)
            if expected is not None and expected in line:
                return time.perf_counter() - began
        if expected is not None:
            raise RuntimeError(f"{' '.join(command)} ended:\n{''.join(printed)}")
        process.wait()
        return time.perf_counter() - began
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
