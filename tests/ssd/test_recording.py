"""Recordings are read, cut and refused."""

from contextlib import suppress

import numpy as np
import pytest

from ssd.replay import RecordedRequest, Recording
from tests.replay import recording_of
from tests.strategies import array


@pytest.fixture
def path(tmp_path):
    """Return a file of 12 requests of 3 sessions, with 30 and 66 tokens each."""
    path = tmp_path / "some.npz"
    np.savez(
        path,
        tokens=np.arange(12 * 96, dtype=np.uint32),
        prompt_len=np.full(12, 30, np.int32),
        output_len=np.full(12, 66, np.int32),
        session=np.arange(12, dtype=np.int32) % 3,
    )
    return path


def changed(path, **arrays):
    """Return the path of a file with other arrays; None: without that array."""
    arrays = {name: array for name, array in (dict(np.load(path)) | arrays).items() if array is not None}
    other = path.with_name("other.npz")
    np.savez(other, **arrays)
    return other


def test_a_file_has_prompts_outputs_and_sessions(path):
    recording = Recording.load(path)
    assert (recording.name, len(recording), recording.output_tokens) == ("some", 12, 12 * 66)
    assert recording.prompt(1).tolist() == list(range(96, 126))
    second = recording.requests[1]
    assert (second.prompt.tolist(), second.output.tolist()) == (list(range(96, 126)), list(range(126, 192)))
    assert second[2:] == (1, -1, -1)


def test_groups_and_versions_are_read_where_a_file_has_them(path):
    groups, versions = np.arange(12) % 2, np.repeat([0, 4, 7], 4)
    recording = Recording.load(changed(path, group=groups, version=versions, session=None))
    assert recording.sessions.tolist() == [-1] * 12
    assert recording.groups.tolist() == groups.tolist()
    assert recording.take([3, 8]).versions.tolist() == [0, 7]


def test_requests_without_output_are_left_out(path):
    outputs, prompts = np.full(12, 66), np.full(12, 30)
    outputs[5], prompts[5] = 0, 96
    recording = Recording.load(changed(path, output_len=outputs, prompt_len=prompts))
    assert len(recording) == 11
    assert recording.requests[5].prompt[0] == 6 * 96


def test_requests_make_a_recording():
    requests = [
        RecordedRequest(array([1]), array([2, 3]), session=4),
        RecordedRequest(array([]), array([5]), version=6),
    ]
    recording = Recording.of(requests, "some")
    assert recording.tokens.tolist() == [1, 2, 3, 5]
    assert [each[2:] for each in recording.requests] == [(4, -1, -1), (-1, -1, 6)]
    assert len(Recording.of([])) == 0


def test_a_recording_is_cut_at_a_number_of_output_tokens(path):
    recording = Recording.load(path)
    assert recording.first(100).output_lengths.tolist() == [66, 34]
    assert recording.first(132).output_lengths.tolist() == [66, 66]
    assert recording.first(10**9) is recording
    backwards = recording_of([([], [1, 2]), ([], [3, 4])], began_s=[9, 8])
    assert backwards.first(3).tokens.tolist() == [3, 4, 1]


def test_files_that_are_cut_off_or_damaged_are_refused(path):
    data = path.read_bytes()
    cut = path.with_name("cut.npz")
    for size in [*range(0, len(data) - 1, len(data) // 60), len(data) - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"cut\.npz is not a recording"):
            Recording.load(cut)
    for at in range(0, len(data), len(data) // 60):
        cut.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        # Some bits of a file have no meaning.
        with suppress(ValueError):
            Recording.load(cut)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": None},
        {"tokens": np.arange(12 * 96 - 1)},
        {"tokens": np.full(12 * 96, 0xFFFF_FFFF, np.uint32)},
        {"tokens": np.full(12 * 96, -1)},
        {"tokens": np.full(12 * 96, 1.5)},
        {"tokens": np.zeros((12, 96), np.uint32)},
        {"prompt_len": np.array([126, -66] + [30] * 10)},
        {"prompt_len": np.full(11, 30)},
        {"session": np.zeros(5, np.int32)},
        {"group": np.zeros(5, np.int32)},
        {"version": np.zeros(5, np.int32)},
        {"version": np.full(12, 0.5)},
        {"prompt_len": np.full(12, 96), "output_len": np.zeros(12, np.int32)},
        {name: np.array([], np.int32) for name in ("tokens", "prompt_len", "output_len", "session")},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_inconsistent_files_are_refused(path, wrong):
    with pytest.raises(ValueError, match=r"other\.npz is not a recording"):
        Recording.load(changed(path, **wrong))
