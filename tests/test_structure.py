"""What may import what, and that generated files are what their source says."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

GRPC_EXTRAS = ("grpc_health", "grpc_reflection")

ALLOWED = {
    "ssd": {"ssd", "numpy", "numba", "llvmlite", "pydivsufsort"},
    "drafter_service": {
        "drafter_service",
        "ssd",
        "annotated_types",
        "click",
        "fsspec",
        "google.protobuf",
        "grpc",
        *GRPC_EXTRAS,
        "jinja2",
        "numpy",
        "opentelemetry",
        "orjson",
        "prometheus_client",
        "pyarrow",
        "pydantic",
        "redis",
        "rich",
        "structlog",
        "tokenizers",
        "tomli_w",
    },
    "engine": {
        "engine",
        "ssd",
        "drafter_service.client",
        "drafter_service.observability.charts",
        "click",
        "fastapi",
        "flashinfer",
        "huggingface_hub",
        "numpy",
        "orjson",
        "prometheus_client",
        "pydantic",
        "rich",
        "safetensors",
        "starlette",
        "tokenizers",
        "torch",
        "triton",
        "uvicorn",
    },
}
"""Beside the standard library, of which `ssd` may not open sockets."""


def imports_of(path):
    """Modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(package):
    return [path for path in (ROOT / package).rglob("*.py") if "stubs" not in path.parts]


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_they_may(package):
    def may_import(module):
        if any(module == name or module.startswith(name + ".") for name in ALLOWED[package]):
            return True
        return module.split(".")[0] in sys.stdlib_module_names and (package, module) != ("ssd", "socket")

    offences = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(package)
        for module in imports_of(path)
        if not may_import(module)
    ]
    assert not offences


def test_no_module_imports_those_that_import_it():
    """Within a package imports form no cycle."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for package in ALLOWED for path in sources(package)
    }
    arrows = {name: {module for module in imports_of(path) if module in modules} for name, path in modules.items()}
    done: set[str] = set()

    def visit(name, trail):
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for other in sorted(arrows[name]):
                visit(other, [*trail, name])
            done.add(name)

    for name in sorted(modules):
        visit(name, [])


def test_generated_stubs_are_those_of_the_contract(tmp_path):
    pytest.importorskip("grpc_tools", reason="grpcio-tools is part of the dev extra")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            "-Idrafter_service/stubs=protos/ssd/drafter/v1",
            f"--python_out={tmp_path}",
            f"--pyi_out={tmp_path}",
            f"--grpc_python_out={tmp_path}",
            "drafter_service/stubs/drafter.proto",
        ],
        cwd=ROOT,
        check=True,
    )
    generated = sorted((tmp_path / "drafter_service" / "stubs").iterdir())
    assert [path.name for path in generated] == ["drafter_pb2.py", "drafter_pb2.pyi", "drafter_pb2_grpc.py"]
    for path in generated:
        shipped = ROOT / "drafter_service" / "stubs" / path.name
        assert shipped.read_text() == path.read_text(), f"{path.name} is stale; run: make protos"
