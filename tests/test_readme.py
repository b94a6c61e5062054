"""Examples, commands and figures in the README are correct."""

import re
from pathlib import Path

from engine.models.shipped import SHIPPED_MODEL
from tests.engine.api.serving import serving

README = (Path(__file__).parent.parent / "README.md").read_text()


def examples():
    """Return the Python examples in the README."""
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


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


def test_perplexities_equal_the_model_card():
    card = (SHIPPED_MODEL / "README.md").read_text()
    scores = [re.search(rf"\| {name}.*?\| ([\d.]+)", card)[1] for name in ("this model", "interpolated")]
    assert f"| {', '.join(scores)} |" in README


def test_make_targets_in_the_readme_exist():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE))
    assert {"run", "test", "setup"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
