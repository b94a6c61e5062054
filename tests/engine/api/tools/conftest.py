"""A server whose chat template has tools, and whose vocabulary has a special token that begins calls."""

import json
import shutil

import pytest

from engine.models.shipped import SHIPPED_MODEL
from tests.engine.api.serving import MODEL, serving

VOCAB = 4096

TEMPLATE = """{%- if tools %}Write calls as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for message in messages %}# {{ message.role }}: {{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}# answer
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


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / MODEL
    shutil.copytree(SHIPPED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    rename_last_token(folder, "<tool_call>")
    return folder


@pytest.fixture(scope="package")
def server(folder):
    with serving("--max-sequences", "8", "--drafter", "ngram+ssd", model=folder) as server:
        yield server


@pytest.fixture
def http(server):
    return server.http
