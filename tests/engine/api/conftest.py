"""Shared servers of the tests in this folder; tests that stop one or need other options start their own."""

import shutil

import pytest

from engine.models.shipped import SHIPPED_MODEL
from tests.engine.api.serving import MODEL, serving
from tests.engine.lora_folders import write_adapter

TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# answer\n{% endif %}"
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The shipped model, with a chat template."""
    folder = tmp_path_factory.mktemp("model") / MODEL
    shutil.copytree(SHIPPED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def server(folder):
    with serving("--max-sequences", "8", "--max-waiting", "400", model=folder) as server:
        yield server


@pytest.fixture(scope="session")
def optional(folder, tmp_path_factory):
    """A client of a server with what is off by default: adapters `a` and `b`, new weights, and answers to repeats."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("ab"):
        write_adapter(root / name, SHIPPED_MODEL, seed=seed)
    adapters = [f"--lora={name}={root / name}" for name in "ab"]
    with serving("--answer-repeats", "--allow-weight-updates", *adapters, model=folder) as server:
        yield server.http


@pytest.fixture
def http(server):
    return server.http


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"
