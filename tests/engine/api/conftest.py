"""Shared servers of the tests in this folder; tests that stop one or need other options start their own."""

import json
import shutil

import pytest

from engine.models.shipped import SHIPPED_MODEL
from tests.engine.api.serving import KEY, MODEL, serving
from tests.engine.lora_folders import write_adapter

TEMPLATE = """{%- if tools %}Write calls as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}# {{ message.role }}: {{ message.content or "" }}
{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>
{% endfor %}{% endfor %}{% if add_generation_prompt %}# answer
{% endif %}"""


def rename_last_token(folder, name):
    """Turn the last token of the vocabulary, which no other token contains, into a special token."""
    path = folder / "tokenizer.json"
    settings = json.loads(path.read_text())
    vocabulary, merges = settings["model"]["vocab"], settings["model"]["merges"]
    last = max(vocabulary.values())
    spelling = next(key for key, token in vocabulary.items() if token == last)
    assert "".join(merges.pop()) == spelling
    del vocabulary[spelling]
    vocabulary[name] = last
    settings["added_tokens"].append(settings["added_tokens"][0] | {"id": last, "content": name, "special": True})
    path.write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The shipped model, with a chat template that has tools, and a special token that begins calls."""
    folder = tmp_path_factory.mktemp("model") / MODEL
    shutil.copytree(SHIPPED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    rename_last_token(folder, "<tool_call>")
    return folder


@pytest.fixture(scope="session")
def keys(tmp_path_factory):
    """A file of API keys."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"# ours\n{KEY}\n")
    return path


@pytest.fixture(scope="session")
def server(folder, keys):
    with serving("--max-sequences", "8", "--max-waiting", "400", "--api-keys", str(keys), model=folder) as server:
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
