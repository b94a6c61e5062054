"""The wheel, installed into an empty environment without extras: library, sidecar and clients work without PyTorch."""

import subprocess
from importlib.metadata import distributions

import pytest

from benchmarks.startup import Environment, can_install

MOST_MB = 350

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
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    if not can_install():
        pytest.skip("pip finds packages neither in its cache nor in a registry")
    made = Environment(tmp_path_factory.mktemp("wheel"))
    made.copy_kernels()
    return made


def output_of(environment, *arguments):
    done = subprocess.run(
        environment.command(*arguments), cwd=environment.folder, env={}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_base_install_is_small_and_has_no_torch(environment):
    names = {found.name.lower() for found in distributions(path=[str(environment.packages)])}
    assert not names & {"torch", "triton", "safetensors", "transformers"}
    assert sum(environment.distributions().values()) <= MOST_MB


def test_every_module_of_library_and_sidecar_imports_without_extras(environment):
    imported = output_of(environment, "python", "-I", "-c", IMPORT_EVERYTHING).split()
    assert {"ssd.drafter", "drafter_service.server.server"} <= set(imported)
    assert any(name.startswith("drafter_service.client.") for name in imported)


def test_types_are_declared(environment):
    assert all((environment.packages / name / "py.typed").exists() for name in ("ssd", "drafter_service", "engine"))


def test_the_installed_sidecar_drafts(environment, socket_address):
    command = environment.command("ssd-drafter", "serve", "--listen", socket_address)
    with subprocess.Popen(command, env={}, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert "listening at" in server.stdout.readline()
            assert output_of(environment, "python", "-I", "-c", DRAFT, socket_address).split() == ["7", "5", "6", "7"]
        finally:
            server.terminate()
            server.communicate(timeout=30)
