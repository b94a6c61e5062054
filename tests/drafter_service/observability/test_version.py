"""Version of this distribution."""

from importlib.metadata import PackageNotFoundError

import pytest

from drafter_service.observability import version


def test_a_source_tree_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise PackageNotFoundError(name)

    assert version.own_version()[0].isdigit()
    monkeypatch.setattr(version, "version", not_installed)
    assert version.own_version() == "unknown"
