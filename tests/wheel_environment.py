"""An empty virtual environment with a wheel of this distribution."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = "ssd-drafter"
PROBE = "click"
"""A small dependency that is used to check whether pip can download packages."""
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
