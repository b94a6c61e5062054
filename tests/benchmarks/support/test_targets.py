"""Targets of benchmarks, and the end of a run."""

import json

import pytest

from benchmarks.support.targets import at_least, at_most, conclude


@pytest.mark.parametrize(("value", "code"), [(2.0, 0), (2.1, 1)])
def test_a_missed_target_is_the_exit_code(value, code, tmp_path, capsys):
    document = {"targets": [at_most(2).row("delay", value), at_least(1).row("speed", 1.0)]}
    with pytest.raises(SystemExit) as ended:
        conclude("name", document, tmp_path)
    assert ended.value.code == code
    said = capsys.readouterr()
    assert json.loads(said.out) == json.loads((tmp_path / "name.json").read_text()) == document
    assert ("MISSED   delay: 2.1 (at most 2)" in said.err) == bool(code)
    assert "reached  speed: 1 (at least 1)" in said.err
