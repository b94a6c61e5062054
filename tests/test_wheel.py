"""The distributions: their contents and metadata, and the wheel in empty environments, where it needs no PyTorch.

`make dist` tests those in build/dist, also with other versions of Python that this machine has, and with the engine.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
from email import message_from_bytes
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
MOST_MB = 350
"""Size of the base install."""
MOST_FILE_MB = 40
"""Size of one distribution: 27 MB are weights of the shipped model and its heads, compressed."""

BUILT = os.environ.get("DIST")
"""Folder with distributions; without it, they are built, and tested with this Python only."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"])) if BUILT else [THIS]

IMPORT_EVERYTHING = """
import pkgutil, ssd, drafter_service
for package in (ssd, drafter_service):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        __import__(module.name)
        print(module.name)
"""

DRAFT = """
import sys
from drafter_service.client import DrafterClient
with DrafterClient(sys.argv[1], required=True, deadline_s=60) as client:
    print(*client.propose([5, 6, 7, 5, 6], max_draft=4).tokens)
    print(client.transport)
"""


def run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)


def pip(*arguments):
    run(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


class Environment:
    """An empty virtual environment with a wheel of this distribution and what it needs, in `folder`."""

    def __init__(self, folder, wheel, python=sys.executable):
        self.folder, self._constraints = folder, folder / "constraints.txt"
        run(python, "-m", "venv", "--without-pip", folder)
        versions = {found.name: found.version.split("+")[0] for found in distributions()}
        pins = [f"{name}=={version}\n" for name, version in versions.items() if name != PROJECT["name"]]
        self._constraints.write_text("".join(pins))
        self.install(wheel)

    def install(self, *arguments):
        """Install further packages, in the versions of the running environment."""
        target = ["--python", self.folder / "bin" / "python"]
        pip(*target, "install", "--no-compile", "--constraint", self._constraints, *arguments)

    @property
    def packages(self):
        """Folder that packages are installed in."""
        (folder,) = self.folder.glob("lib/python3.*/site-packages")
        return folder

    def command(self, *arguments):
        """Return the command line of a program of the environment."""
        return [str(self.folder / "bin" / arguments[0]), *arguments[1:]]

    def copy_kernels(self):
        """Copy the compiled kernels of this checkout; compiling them would take about a minute.

        numba caches a kernel beside its source and checks the source's modification time, so both are copied.
        """
        for source in (ROOT / "ssd").rglob("*.py"):
            assert (self.packages / source.relative_to(ROOT)).read_bytes() == source.read_bytes()
        shutil.copytree(ROOT / "ssd", self.packages / "ssd", dirs_exist_ok=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if BUILT:
        return Path(BUILT)
    folder = tmp_path_factory.mktemp("dist")
    try:
        # A small dependency shows whether pip can download packages.
        pip("download", "--no-deps", "--retries", "0", "--dest", tmp_path_factory.mktemp("probe"), "click")
    except subprocess.CalledProcessError:
        pytest.skip("pip finds packages neither in its cache nor in a registry")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel):
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def interpreter(version):
    """Return the path of a Python; None: this machine has none of this version."""
    if version == THIS:
        return sys.executable
    pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    found = [shutil.which(f"python{version}"), *map(str, pyenv)]
    # A shim of pyenv exists for versions that are not selected, too, and fails.
    works = [path for path in found if path and subprocess.run([path, "-V"], capture_output=True).returncode == 0]
    return works[0] if works else None


@pytest.fixture(scope="module", params=PYTHONS)
def environment(request, wheel, tmp_path_factory):
    if (python := interpreter(request.param)) is None:
        pytest.skip(f"no Python {request.param} is installed")
    made = Environment(tmp_path_factory.mktemp("wheel") / "environment", wheel, python)
    if request.param == THIS:
        made.copy_kernels()
    else:
        output_of(made, "ssd-drafter", "precompile")
    return made


def output_of(environment, *arguments):
    done = subprocess.run(
        environment.command(*arguments), cwd=environment.folder, env={}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def sources():
    """Return the files of the three packages that git does not ignore."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "ssd", "drafter_service", "engine"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {name for name in names if (ROOT / name).exists()}


def test_the_wheel_contains_the_sources_of_the_packages_alone(wheel):
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == sources()
    assert {"ssd/py.typed", "drafter_service/py.typed", "engine/py.typed", "ssd/kernels/prior.npz"} <= names
    assert "engine/models/assets/stdlib-7m/model.safetensors" in names
    assert wheel.stat().st_size <= MOST_FILE_MB * 1e6


def test_the_source_distribution_also_contains_the_documents_of_the_project(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    others = {".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "SECURITY.md", "pyproject.toml"}
    assert names == sources() | others
    assert path.stat().st_size <= MOST_FILE_MB * 1e6


def test_the_metadata_names_version_licenses_and_extras_but_no_torch_in_the_base(metadata):
    assert (metadata["Name"], metadata["Version"]) == (PROJECT["name"], PROJECT["version"])
    assert metadata["License-Expression"] == PROJECT["license"]
    assets = {str(path.relative_to(ROOT)) for path in (ROOT / "engine" / "models" / "assets").rglob("LICENSE.txt")}
    assert set(metadata.get_all("License-File")) == {"LICENSE", *assets}
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    base = [needed for needed in metadata.get_all("Requires-Dist") if "extra ==" not in needed]
    assert {re.match(r"[\w.-]+", needed)[0] for needed in base} == {
        re.match(r"[\w.-]+", needed)[0] for needed in PROJECT["dependencies"]
    }


def test_the_changelog_has_the_usual_form_and_a_section_for_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased, newest, *_ = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert unreleased == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(PROJECT['version'])}\] - \d{{4}}-\d\d-\d\d", newest)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)", text, re.MULTILINE)) <= kinds


def test_the_base_install_is_small_and_has_no_torch(environment):
    installed = [*distributions(path=[str(environment.packages)])]
    names = {found.name.lower() for found in installed}
    assert not names & {"torch", "triton", "safetensors", "transformers"}
    files = [found.locate_file(file) for found in installed for file in found.files or ()]
    assert sum(path.stat().st_size for path in files if path.exists()) <= MOST_MB * 1e6


def test_both_commands_print_their_version(environment):
    for command in ("ssd-drafter", "ssd-engine"):
        assert output_of(environment, command, "--version") == f"{command}, version {PROJECT['version']}\n"


def test_every_module_of_library_and_sidecar_imports_without_extras(environment):
    imported = output_of(environment, "python", "-I", "-c", IMPORT_EVERYTHING).split()
    assert {"ssd.drafter", "drafter_service.server.server"} <= set(imported)
    assert any(name.startswith("drafter_service.client.") for name in imported)


def test_the_installed_sidecar_drafts(environment):
    command = environment.command("ssd-drafter", "serve", "--listen", "127.0.0.1:0")
    with subprocess.Popen(command, env={}, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline()
            assert "listening at" in line
            drafted = output_of(environment, "python", "-I", "-c", DRAFT, re.search(r"at (\S+),", line)[1])
            assert drafted.split() == ["7", "5", "6", "7", "grpc"]
        finally:
            server.terminate()
            server.communicate(timeout=60)


@pytest.mark.skipif(not BUILT, reason="only `make dist` installs PyTorch into an empty environment")
def test_the_installed_engine_generates(wheel, tmp_path):
    environment = Environment(tmp_path / "environment", wheel)
    environment.copy_kernels()
    environment.install(*shlex.split(os.environ.get("TORCH_PIP_ARGS", "")), "torch")
    environment.install(f"{wheel}[engine]")
    assert output_of(environment, "ssd-engine", "generate", "def quicksort(items):", "--max-tokens", "8")
