import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ssd.follow import NONE, count_shared, follow
from ssd.types import DraftBatch

TOKENS = st.integers(0, 2)


@st.composite
def trees(draw):
    """Tokens and parents of a draft whose siblings differ, as drafters make them."""
    nodes = []
    for token in draw(st.lists(TOKENS, max_size=12)):
        parent = draw(st.integers(-1, len(nodes) - 1))
        if (token, parent) not in nodes:
            nodes.append((token, parent))
    return nodes


def batch_of(drafts):
    """Each node's odds tell which it was."""
    sizes = [len(draft) for draft in drafts]
    nodes = [node for draft in drafts for node in draft]
    return DraftBatch(
        np.array([token for token, _ in nodes], np.uint32),
        np.array([parent for _, parent in nodes], np.int32),
        np.arange(len(nodes), dtype=np.float32),
        np.arange(len(nodes), dtype=np.uint8) % 2,
        np.cumsum([0, *sizes]).astype(np.uint32),
    )


def path_to(nodes, node):
    """The tokens from the context to a node."""
    path = []
    while node >= 0:
        path.insert(0, nodes[node][0])
        node = nodes[node][1]
    return path


@given(st.data(), st.lists(trees(), min_size=1, max_size=4))
def test_what_is_left_is_what_stood_behind_the_tokens(data, drafts):
    picks = data.draw(st.lists(st.integers(NONE, len(drafts) - 1), max_size=4))
    produced = [
        data.draw(
            st.lists(TOKENS, max_size=3) | st.sampled_from([path_to(drafts[p], i) for i in range(len(drafts[p]))])
        )
        if p >= 0 and drafts[p]
        else data.draw(st.lists(TOKENS, max_size=3))
        for p in picks
    ]
    batch = batch_of(drafts)
    offsets = np.cumsum([0, *map(len, produced)]).astype(np.uint32)
    tokens = np.array([token for one in produced for token in one], np.uint32)

    left = follow(batch, np.array(picks, np.int64), tokens, offsets)

    assert len(left) == len(picks)
    for index, (pick, behind) in enumerate(zip(picks, produced, strict=True)):
        draft = drafts[pick] if pick >= 0 else []
        first = int(batch.offsets[pick]) if pick >= 0 else 0
        # Nodes below the one that the tokens prefix to, by their paths.
        expected = {
            first + node: path_to(draft, node)[len(behind) :]
            for node in range(len(draft))
            if path_to(draft, node)[: len(behind)] == behind and len(path_to(draft, node)) > len(behind)
        }
        span = slice(left.offsets[index], left.offsets[index + 1])
        nodes = list(zip(left.tokens_of(index).tolist(), left.parents_of(index).tolist(), strict=True))
        assert [int(odds) for odds in left.accept_prob[span]] == sorted(expected)
        assert left.source[span].tolist() == [node % 2 for node in sorted(expected)]
        for place, node in enumerate(sorted(expected)):
            assert nodes[place][1] < place
            assert path_to(nodes, place) == expected[node]


ROWS = st.lists(st.lists(TOKENS, max_size=5), min_size=1, max_size=4)


@given(st.data(), ROWS, ROWS)
def test_shared_tokens_are_counted_up_to_the_first_that_differs(data, rows, others):
    pairs = data.draw(
        st.lists(st.tuples(st.integers(NONE, len(rows) - 1), st.integers(NONE, len(others) - 1)), max_size=5)
    )
    picks = np.array(pairs, np.int64).reshape(-1, 2)

    def batch(lists):
        return batch_of([[(token, place - 1) for place, token in enumerate(row)] for row in lists])

    counted = count_shared(batch(rows), picks[:, 0].copy(), batch(others), picks[:, 1].copy())

    expected = []
    for one, other in pairs:
        count = 0
        if one >= 0 and other >= 0:
            while rows[one][: count + 1] == others[other][: count + 1] and count < min(
                len(rows[one]), len(others[other])
            ):
                count += 1
        expected.append(count)
    assert counted.tolist() == expected


@given(st.lists(st.lists(trees(), max_size=3), min_size=1, max_size=3))
def test_batches_are_concatenated(lists):
    joined = DraftBatch.concatenate([batch_of(drafts) for drafts in lists])

    drafts = [draft for drafts in lists for draft in drafts]
    assert len(joined) == len(drafts)
    for index, draft in enumerate(drafts):
        assert joined.tokens_of(index).tolist() == [token for token, _ in draft]
        assert joined.parents_of(index).tolist() == [parent for _, parent in draft]
