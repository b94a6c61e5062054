"""Tasks for chat models: their order, and a short run with a tiny model."""

import json

import pytest

from engine.commands.demo.tasks import TASKS_FILE, make_tasks
from engine.models.tokenizer import ChatPrompts, Tokenizer
from tests.engine.commands.demo.test_demo import run_demo, short_run  # noqa: F401  # a fixture
from tests.engine.conftest import make_folder

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    make_folder(folder, num_hidden_layers=1, max_position_embeddings=4096)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_tasks_of_a_conversation_are_in_order(chat_folder):
    chat = ChatPrompts(chat_folder, Tokenizer(chat_folder))
    tasks = make_tasks(chat, seed=0)
    conversations = [json.loads(line) for line in TASKS_FILE.read_text().splitlines()]
    assert {task.task for task in tasks} == {"edit", "quote", "json", "agent"}
    assert len(tasks) == sum((len(each["messages"]) + 1) // 2 for each in conversations) >= 30
    assert len({task.prompt for task in tasks}) == len(tasks)
    prompts = [task.prompt for task in tasks]
    for each in conversations:
        assert len(each["messages"]) % 2 == 1, "the last message is the model's to answer"
        assert all(map(json.loads, each["messages"][1::2])), "an agent answers in JSON"
        own = [at for at, prompt in enumerate(prompts) if prompt.startswith(f"<user>{each['messages'][0]}")]
        assert own == sorted(own, key=lambda at: len(prompts[at]))
    assert make_tasks(chat, seed=0) == tasks != make_tasks(chat, seed=1)


def test_a_chat_model_runs_the_tasks_with_identical_outputs(chat_folder, tmp_path, capsys):
    assert run_demo(chat_folder, tmp_path) == 0
    run = json.loads((tmp_path / "run.json").read_text())
    tasks = {result["drafter"]: result for result in run["results"] if result["part"] == "by kind of request"}
    assert all(result["identical"] for result in run["results"])
    assert tasks.pop("all")["prompts"] == sum(result["prompts"] for result in tasks.values()) == 10
    printed = capsys.readouterr().out
    assert all(f"the last output of {task}:" in printed for task in tasks)
    assert all(f"<td>{task}</td>" in (tmp_path / "run.html").read_text() for task in tasks)


def test_a_model_without_prompts_and_chat_template_is_refused(model_folder, tmp_path, capsys):
    assert run_demo(model_folder, tmp_path) == 2
    assert "has neither a prompts.jsonl, with functions to complete, nor a chat template" in capsys.readouterr().err
