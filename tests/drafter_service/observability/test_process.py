"""Version of this distribution, of an installed one and of a source tree."""

from importlib.metadata import PackageNotFoundError

import pytest

from drafter_service.observability import process


def test_a_source_tree_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    assert process.own_version()[0].isdigit()
    monkeypatch.setattr(process, "version", not_installed)
    assert process.own_version() == "unknown"
