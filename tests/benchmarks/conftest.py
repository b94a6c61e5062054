import numpy as np
import pytest

PHRASE = 7


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """Return a trace file: eight requests of four sessions repeat one phrase, in token ids above small vocabularies."""
    phrase = np.random.default_rng(0).integers(150_000, 200_000, PHRASE).astype(np.uint32)
    lengths = np.full(8, 20, np.int32)
    path = tmp_path_factory.mktemp("trace") / "phrase.npz"
    np.savez(
        path,
        tokens=np.tile(np.resize(phrase, 40), 8),
        prompt_len=lengths,
        output_len=lengths,
        session=np.arange(8, dtype=np.int32) % 4,
    )
    return path
