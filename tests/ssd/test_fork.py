"""A forked child refuses text for a corpus whose maintainer runs in its parent: it would never be indexed."""

import os
import signal

import pytest

from ssd import Corpus, DrafterConfig, SuffixDrafter
from ssd.errors import UserError
from tests.strategies import array

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
CONFIG = DrafterConfig(capacity=10_000)


def succeeds_in_fork(check):
    """Call `check` in a forked child; return whether it returned True."""
    child = os.fork()
    if child == 0:
        is_true = False
        try:
            is_true = check()
        finally:
            os._exit(0 if is_true else 1)
    return os.waitpid(child, 0)[1] == 0


def refuses(call):
    """Return whether a call raises the error that names the parent."""
    try:
        call()
    except UserError as error:
        return f"in process {os.getppid()}" in str(error) and "in each process" in str(error)
    return False


@pytest.mark.parametrize(
    "use",
    [
        lambda drafter: drafter.start(2, array([1, 2])),
        lambda drafter: drafter.finish(1, array([3, 4])),
        lambda drafter: drafter.corpus.append(array([1, 2])),
        lambda drafter: drafter.corpus.refresh(),
        lambda drafter: drafter.corpus.maintain(0.01),
    ],
    ids=["start", "finish", "append", "refresh", "maintain"],
)
def test_a_forked_child_refuses_text_for_its_parents_corpus(use):
    with SuffixDrafter(CONFIG) as drafter:
        drafter.start(1, array([1, 2]))
        assert succeeds_in_fork(lambda: refuses(lambda: use(drafter)))


def test_a_forked_child_may_close_its_parents_drafter():
    with SuffixDrafter(CONFIG) as drafter:
        drafter.start(1, array([1, 2]))

        def closes():
            drafter.close()
            return True

        assert succeeds_in_fork(closes)


def test_a_forked_child_may_use_a_corpus_without_a_maintainer():
    corpus = Corpus.from_config(CONFIG)

    def maintains():
        corpus.append(array([1, 2, 3]))
        corpus.refresh()
        corpus.maintain(0.01)
        corpus.close()
        return corpus.indexed == 4

    assert succeeds_in_fork(maintains)
    assert maintains()


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent():
    corpus = Corpus.from_config(CONFIG)
    lock = corpus.fallback.arrays.lock
    lock[0] = 1  # As while a thread of this process learns.

    def erases():
        signal.alarm(20)  # It ends the process, as nothing else would end the wait for the lock.
        corpus.fallback.erase(0.0)
        return True

    assert succeeds_in_fork(erases)
    assert lock[0] == 1
