"""Commands in the README are correct, and examples in docs/api.md and docs/replay.md run."""

import re
import sys
from pathlib import Path

from engine.drafters.registry import KINDS
from engine.models.shipped import SHIPPED_MODEL
from tests.curves import line
from tests.engine.lora_folders import write_adapter

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


IMPORTS, ONE, BATCH, KEEPING, REPLAY, CLIENT, ENGINE, ADAPTERS, INTERFACE = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL
)
"""Python examples of docs/api.md, in their order."""


def test_install_commands_need_no_package_index():
    """The distribution is not on a package index; its extras are those of a checkout."""
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert not [path.name for path in documents if re.search(r"\binstall '?ssd-drafter", path.read_text())]


def test_the_library_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(BATCH, names)
    assert names["drafts"].tokens_of(0).tolist() == [7, 5, 6, 7, 5, 6]
    exec(KEEPING, names)
    assert (tmp_path / "corpus.ssd").exists()


def test_the_replay_example_prints_what_it_says(capsys):
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "replay.md").read_text(), re.DOTALL)
    exec(example, {})
    totals, each = capsys.readouterr().out.splitlines()
    assert [f"{float(word):.2f}" for word in totals.split()] == re.search(r"# ([\d. ]+)\n", example)[1].split()
    assert each == "[ 1.    11.875 23.75 ]"


def test_the_drafting_example_runs_with_a_sidecar(server, socket_address):
    remote = re.sub(r"drafter = SuffixDrafter\(\)\n# (drafter = DrafterClient.*\n)", r"\1", BATCH)
    names = {}
    # The deadline is longer for busy machines.
    exec(remote.replace("unix:/tmp/ssd-drafter.sock", socket_address).replace("deadline_s=1.0", "deadline_s=30"), names)
    assert isinstance(names["drafter"], names["DrafterClient"])
    assert names["drafts"].tokens_of(0).tolist() == [7, 5, 6, 7, 5, 6]


def test_the_examples_of_the_interface_run(tmp_path, monkeypatch, capsys):
    # Measuring steps takes seconds.
    monkeypatch.setattr("engine.executor.build.measured_curve", lambda *_, **__: line(0.01))
    [first] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for example in (first, IMPORTS, ONE, REPLAY, CLIENT, INTERFACE):
        exec(example, {})
    assert capsys.readouterr().out == "[4 5]\n[4 5]\n"
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    own = ENGINE.replace(
        'build_drafter("ssd", DrafterConfig())',
        'build_drafter("own_drafter:Pairs", DrafterConfig(options={"tokens": "3"}))',
    ).replace(", has_budget=True", "")
    assert own.count("own_drafter") == 1
    outputs = []
    for example in (ENGINE, own):
        names = {}
        exec(example, names)
        outputs.append(names["completion"])
    assert outputs[0].tokens.tolist() == outputs[1].tokens.tolist()
    assert outputs[1].drafted > 20
    assert "items" in capsys.readouterr().out
    write_adapter(tmp_path / "adapter", SHIPPED_MODEL)
    exec(ADAPTERS.replace("/path/to/adapter", str(tmp_path / "adapter")), names)
    assert names["with_adapter"].tokens.tolist() != names["without"].tokens.tolist()


def test_the_table_of_drafters_has_every_kind():
    table = re.search(r"^\| kind \|.*?\n\n", (ROOT / "docs" / "drafters.md").read_text(), re.DOTALL | re.MULTILINE)[0]
    kinds = [kind for row in table.split("\n|")[2:] for kind in re.findall(r"`([\w.:-]+)`", row.split("|")[0])]
    assert kinds == [*KINDS, "package.module:Class"]


def test_make_targets_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE))
    assert {"run", "test", "setup"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
