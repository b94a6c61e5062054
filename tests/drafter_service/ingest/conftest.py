"""Fixtures for tests of loads."""

import pytest

from drafter_service.ingest.reading import Vocabulary
from tests.drafter_service.ingest.loads import model_folder


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """Return the shipped tokenizer with a chat template."""
    return Vocabulary(model_folder(tmp_path_factory.mktemp("models") / "model"))
