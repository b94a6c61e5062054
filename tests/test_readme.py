"""Examples, commands and figures in the README and in docs/api.md are correct."""

import re
import sys
from pathlib import Path

from engine.drafters.kinds import KINDS
from engine.models.shipped import SHIPPED_MODEL
from tests.engine.api.serving import serving
from tests.engine.lora_folders import write_adapter

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def examples(text=README):
    """Return the Python examples in a document, by default the README."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_install_commands_need_no_package_index():
    """The distribution is not on a package index; its extras are those of a checkout."""
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert not [path.name for path in documents if re.search(r"\binstall '?ssd-drafter", path.read_text())]


def test_the_client_example_runs(capsys):
    with serving() as server:
        exec(examples()[0].replace("http://127.0.0.1:8000", server.url), {})
    assert len(capsys.readouterr().out) > 20


def test_the_library_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, drafting, keeping = examples()
    names = {}
    exec(drafting, names)
    assert names["drafts"].tokens_of(0).tolist() == [7, 5, 6, 7, 5, 6]
    exec(keeping, names)
    assert (tmp_path / "corpus.ssd").exists()


def test_the_drafting_example_runs_with_a_sidecar(server, socket_address):
    _, drafting, _ = examples()
    remote = re.sub(r"drafter = SuffixDrafter\(\)\n# (drafter = DrafterClient.*\n)", r"\1", drafting)
    names = {}
    exec(remote.replace("unix:/tmp/ssd-drafter.sock", socket_address), names)
    assert isinstance(names["drafter"], names["DrafterClient"])
    assert names["drafts"].tokens_of(0).tolist() == [7, 5, 6, 7, 5, 6]


def test_the_examples_of_the_interface_run(tmp_path, monkeypatch, capsys):
    imports, drafting, client, engine, adapters, drafter, interface = examples((ROOT / "docs" / "api.md").read_text())
    for example in (imports, drafting, client, interface):
        exec(example, {})
    assert capsys.readouterr().out == "[4 5]\n"
    (tmp_path / "documented_drafter.py").write_text(drafter)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = engine.replace(
        'build_drafter("ssd", DrafterConfig())',
        'build_drafter("documented_drafter:Repeat", DrafterConfig(options={"times": "3"}))',
    ).replace(", has_budget=True", "")
    assert own.count("documented_drafter") == 1
    outputs = []
    for example in (engine, own):
        names = {}
        exec(example, names)
        outputs.append(names["completion"])
    assert outputs[0].tokens.tolist() == outputs[1].tokens.tolist()
    assert outputs[1].drafted > 30
    assert "items" in capsys.readouterr().out
    write_adapter(tmp_path / "adapter", SHIPPED_MODEL)
    exec(adapters.replace("/path/to/adapter", str(tmp_path / "adapter")), names)
    assert names["with_adapter"].tokens.tolist() != names["without"].tokens.tolist()


def test_the_table_of_drafters_has_every_kind():
    table = README[README.index("| `--drafter` |") :].split("\n\n")[0]
    assert re.findall(r"^\| `([\w.:-]+)`", table, re.MULTILINE)[1:] == [*KINDS, "package.module:Class"]


def test_perplexities_equal_the_model_card():
    card = (SHIPPED_MODEL / "README.md").read_text()
    scores = [re.search(rf"\| {name}.*?\| ([\d.]+)", card)[1] for name in ("this model", "interpolated")]
    assert f"| {', '.join(scores)} |" in README


def test_make_targets_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE))
    assert {"run", "test", "setup"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
