"""The tables of running sequences: last drafts, and which of their tokens were accepted."""

from hypothesis import given
from hypothesis import strategies as st

from ssd.sequences.local_index import LocalIndex
from ssd.sequences.tables import NODES, PARENT, TOKEN, Sequences
from tests.strategies import LARGEST, array, examples

MAX_DRAFT = 8


@st.composite
def trees(draw):
    """Generate the tokens and parents of a tree in which siblings differ."""
    tokens, parents = [], []
    for node in range(draw(st.integers(0, MAX_DRAFT))):
        token, parent = draw(st.sampled_from([0, 1, LARGEST])), draw(st.integers(-1, node - 1))
        if (token, parent) not in zip(tokens, parents, strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


@given(trees(), st.integers(0, MAX_DRAFT), st.lists(st.sampled_from([0, 1, LARGEST]), max_size=6))
@examples(200)
def test_accepted_tokens_are_a_path_of_the_verified_part_of_the_last_draft(tree, verified, committed):
    tokens, parents = tree
    sequences = Sequences(MAX_DRAFT)
    row = sequences.add(LocalIndex(32), owner=0)
    nodes = sequences.tables[1][row]
    nodes[1 : 1 + len(tokens), TOKEN] = array(tokens).view("i4")
    nodes[1 : 1 + len(tokens), PARENT] = [parent + 1 for parent in parents]
    sequences.state[row, NODES] = 1 + len(tokens)
    node, accepted = -1, 0
    for token in committed:
        children = [at for at in range(min(verified, len(tokens))) if (tokens[at], parents[at]) == (token, node)]
        if not children:
            break
        node, accepted = children[0], accepted + 1
    assert sequences.accepted(row, array(committed), verified) == accepted
