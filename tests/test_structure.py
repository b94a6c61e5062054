"""Rules of the source tree: what each package may import; stubs are up to date, and the protocol is compatible with the
baseline of the last release.
"""

import ast
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from drafter_service.commands.main import ENGINE_KERNELS, KERNELS

ROOT = Path(__file__).parent.parent
PACKAGES = ("ssd", "drafter_service", "engine")

ALLOWED = {
    "ssd": {"ssd", "numpy", "numba", "llvmlite"},
    "drafter_service": {
        "drafter_service",
        "ssd",
        "annotated_types",
        "arctic_inference",
        "click",
        "fsspec",
        "gguf",
        "google.protobuf",
        "grpc",
        "grpc_health",
        "jinja2",
        "numpy",
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
        "drafter_service.observability.measuring",
        "drafter_service.observability.pages",
        "drafter_service.observability.process",
        "drafter_service.settings.flags",
        "annotated_types",
        "click",
        "fastapi",
        "flashinfer",
        "gguf",
        "huggingface_hub",
        "llguidance",
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
"""Modules that a package may import in addition to the standard library; `ssd` may not import `socket`."""

PLUGINS = ROOT / "drafter_service" / "plugins"
"""A plug-in may import its host, which has the name of the module, and torch, inside functions."""

TORCH_FREE_IMPORT = """
import pkgutil, sys, ssd, drafter_service
for package in (ssd, drafter_service):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        __import__(module.name)
assert "torch" not in sys.modules, "torch was imported"
"""


@cache
def tree(path):
    return ast.parse(path.read_text())


def imported_modules(path, *, at_top=False):
    """Yield the names of the modules that a file imports, at its top or inside functions, or only `at_top`."""
    for node in tree(path).body if at_top else ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                path = ROOT.joinpath(*node.module.split("."), alias.name)
                is_module = path.is_dir() or path.with_suffix(".py").exists()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def source_files(package):
    return [path for path in (ROOT / package).rglob("*.py") if "stubs" not in path.parts]


def import_graph(**options):
    """Return the modules of the packages that each module of the packages imports; options: of `imported_modules`."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for package in PACKAGES
        for path in source_files(package)
    }
    return {
        name: {module for module in imported_modules(path, **options) if module in modules}
        for name, path in modules.items()
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_allowed_modules(package):
    def allowed(module, path):
        names = ALLOWED[package]
        if path.is_relative_to(PLUGINS):
            names = names | {path.relative_to(PLUGINS).parts[0].removesuffix(".py"), "torch"}
        if any(module == name or module.startswith(name + ".") for name in names):
            return True
        return module.split(".")[0] in sys.stdlib_module_names and (package, module) != ("ssd", "socket")

    offences = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in source_files(package)
        for module in imported_modules(path)
        if not allowed(module, path)
    ]
    assert not offences


def test_library_and_sidecar_do_not_import_torch():
    subprocess.run([sys.executable, "-c", TORCH_FREE_IMPORT], cwd=ROOT, check=True)


def test_every_module_with_kernels_is_compiled_in_advance():
    graph, imported, reached = import_graph(at_top=True), {*KERNELS, *ENGINE_KERNELS}, set()
    while imported:
        reached.add(name := imported.pop())
        imported |= graph[name] - reached
    names = {name for name, modules in import_graph().items() if "ssd.kernels.jit" in modules}
    assert len(names) > 30
    assert names <= reached


def test_imports_form_no_cycle():
    graph = import_graph()
    done = set()

    def visit(name, trail):
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, [*trail, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])


def test_stubs_match_the_protocol(tmp_path):
    pytest.importorskip("grpc_tools", reason="grpcio-tools (extra dev) is not installed")
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


@pytest.fixture(scope="module")
def buf():
    """Return a function that runs buf in a folder; it is next to this Python (the dev extra), or on the path."""
    folders = Path(sys.executable).parent, os.environ.get("PATH", "")
    if (program := shutil.which("buf", path=os.pathsep.join(map(str, folders)))) is None:
        pytest.skip("buf is not installed; pip install buf-bin")
    return lambda folder, *arguments: subprocess.run(
        [program, *arguments], cwd=folder, capture_output=True, text=True, timeout=60
    )


BREAKING = "breaking", "--against", "protos/baseline.binpb"


@pytest.mark.parametrize("arguments", [("lint",), ("format", "--diff", "--exit-code"), BREAKING])
def test_the_protocol_is_well_formed_formatted_and_compatible_with_the_baseline(buf, arguments):
    done = buf(ROOT, *arguments)
    assert done.returncode == 0, f"{done.stdout}\nafter a release that may break: make protos-baseline"


def test_incompatible_changes_of_the_protocol_are_found(buf, tmp_path):
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    [path] = (tmp_path / "protos").rglob("*.proto")
    changed = path.read_text()
    for before, after in (
        ("  bytes parents = 2;", "  bytes ancestors = 2;"),
        ("  rpc Observe(ObserveRequest) returns (ObserveResponse);\n", ""),
        ("returns (stream DraftResponse)", "returns (DraftResponse)"),
    ):
        assert before in changed
        changed = changed.replace(before, after, 1)
    path.write_text(changed)
    done = buf(tmp_path, *BREAKING)
    assert done.returncode == 100
    assert all(complaint in done.stdout for complaint in ("changed name", "was deleted", "server streaming"))
