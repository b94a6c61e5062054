"""The heads that ship with the package."""

import pytest

from engine.drafters.build import check_weights
from engine.models.shipped import SHIPPED_HEADS, SHIPPED_MODEL
from engine.training.recipe import RECIPES

MAX_BYTES = 28 * 2**20


@pytest.mark.parametrize("kind", RECIPES)
def test_every_kind_has_a_head_with_a_card(kind):
    check_weights(kind, None, SHIPPED_MODEL)
    card = (SHIPPED_HEADS / kind / "README.md").read_text()
    assert f"--drafter {kind}" in card
    assert "tokens per step" in card
    assert (SHIPPED_HEADS / kind / "LICENSE.txt").exists()


def test_all_heads_together_are_small():
    assert sum(path.stat().st_size for path in SHIPPED_HEADS.rglob("*") if path.is_file()) <= MAX_BYTES
