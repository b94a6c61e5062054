"""The adapters in memory: which are read, which are evicted, and which ones give up their slots."""

import pytest

from engine.models.loader import load_config, load_model
from engine.models.lora.format import check_adapters
from engine.models.lora.pool import AdapterPool
from tests.engine.lora_folders import write_adapter


@pytest.fixture
def pool(model_folder, tmp_path):
    """A pool of two slots for the adapters a to d."""
    for name in "abcd":
        write_adapter(tmp_path / name, model_folder, kinds=("q_proj",), layers=[0])
    folders = {name: tmp_path / name for name in "abcd"}
    pool = AdapterPool(load_model(model_folder), check_adapters(folders, load_config(model_folder)), 2)
    yield pool
    pool.close()


def run(pool, *names):
    """Start a sequence of each adapter, which must be possible."""
    for name in names:
        pool.prepare(name)
        pool.wait()
        assert pool.prepare(name)
        pool.acquire(name)


def test_an_adapter_in_use_is_not_evicted(pool):
    run(pool, "a", "b")
    assert not pool.prepare("c")
    pool.release("b")
    pool.prepare("c")
    pool.wait()
    assert pool.prepare("c")
    assert pool.loaded == ["a", "c"]


def test_the_least_recently_used_adapter_gives_its_slot_to_one_that_waits(pool):
    run(pool, "a", "b", "a")
    assert [pool.prepare(name, {"c"}) for name in "ab"] == [True, False]
    assert [pool.prepare(name, {"c", "d"}) for name in "ab"] == [False, False]
    pool.release("b")
    assert pool.prepare("b", {"d"}) is False  # d precedes it
    pool.prepare("c")
    assert pool.prepare("a", {"c"})  # c has a slot while it is read
    pool.wait()
    assert [pool.prepare(name) for name in "ac"] == [True, True]


def test_an_adapter_that_is_in_memory_takes_no_further_slot(pool):
    """Older sequences of b wait although it is in memory, because it gives its slot to c."""
    run(pool, "b", "a")
    assert pool.prepare("a", {"c", "b"})
