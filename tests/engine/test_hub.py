"""Hub names, with a fake in place of the hub: tests have no network."""

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from engine.models.hub import FILES, find_model
from engine.models.loader import load_model
from ssd.errors import UserError
from tests.engine.conftest import make_folder


@pytest.fixture
def hub(monkeypatch):
    """A hub whose answer a test sets; it keeps what it was asked."""

    class Hub:
        answer = None
        asked = None

        def download(self, name, *, allow_patterns):
            self.asked = name, allow_patterns
            if isinstance(self.answer, Exception):
                raise self.answer
            return str(self.answer)

    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.download)
    return fake


def test_a_folder_is_itself(tmp_path, hub, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert find_model(tmp_path) == tmp_path
    assert str(find_model("owner/name")) == "owner/name"
    assert hub.asked is None


def test_a_name_is_downloaded(tmp_path, hub):
    make_folder(tmp_path)
    hub.answer = tmp_path
    assert load_model(find_model("owner/Name-1.5B")).config.num_layers == 2
    assert hub.asked == ("owner/Name-1.5B", FILES)


@pytest.mark.parametrize("name", ["missing", "./owner/name", "../name", "/owner/name", "a/b/c", "owner/", ".hidden/x"])
def test_what_is_no_name_is_taken_for_a_folder(hub, name):
    with pytest.raises(UserError, match="no model folder"):
        load_model(find_model(name))
    assert hub.asked is None


def refusal(kind):
    """As the library raises it, which would want a response."""
    problem = kind.__new__(kind)
    Exception.__init__(problem, "401 Client Error\n\nmore lines")
    return problem


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refusal(GatedRepoError), "terms accepted"),
        (refusal(RepositoryNotFoundError), "no such model"),
        (ConnectionError("broken\npipe"), r"failed \(broken\)"),
        (OSError(28, "No space left on device"), "No space left"),
        (ValueError(), r"failed \(ValueError\)"),
    ],
)
def test_what_goes_wrong_is_said_in_a_line(hub, answer, message):
    hub.answer = answer
    with pytest.raises(UserError, match=message) as refused:
        find_model("owner/name")
    assert "\n" not in str(refused.value)
    assert "owner/name" in str(refused.value)


def test_without_a_network_the_advice_is_to_give_a_folder(tmp_path, monkeypatch):
    """The library itself, told to stay off the network, with nothing downloaded before."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"cannot be reached .* or give a folder"):
        find_model("owner/name")
