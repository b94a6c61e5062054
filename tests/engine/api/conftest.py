"""Shared server of the tests in this folder; tests that stop it or need other options start their own."""

import shutil

import pytest

from engine.models.shipped import SHIPPED_MODEL
from tests.engine.api.serving import MODEL, serving

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


@pytest.fixture
def http(server):
    return server.http


@pytest.fixture(scope="session")
def anyio_backend():
    return "asyncio"
