"""Conversations become arrays: templates, order, outputs that were cut off."""

import base64

import numpy as np
import pytest

from benchmarks.traces.conversion import VOCABULARIES, ChatEncoder, Limits, convert, load_encoder, loops
from benchmarks.traces.formats import RENDERED, Conversation, Message
from tests.benchmarks.traces.byte_encoder import ByteEncoder


def chats(vocabulary="cl100k"):
    return ChatEncoder(VOCABULARIES[vocabulary], ByteEncoder())


def conversation(turns, task="t", stage=0):
    messages = [Message("user", f"{task}?")]
    for turn in range(turns):
        messages += [Message("assistant", f"{task}{turn}"), Message("user", "more")]
    return Conversation(messages[:-1], task, stage)


def requests_of(arrays):
    """Return prompt and output of each request as lists."""
    requests, start = [], 0
    for prompt, output in zip(arrays["prompt_len"].tolist(), arrays["output_len"].tolist(), strict=True):
        tokens = arrays["tokens"][start : start + prompt + output].tolist()
        requests.append((tokens[:prompt], tokens[prompt:]))
        start += prompt + output
    assert start == len(arrays["tokens"])
    return requests


def test_chat_ml():
    (first, second) = chats().requests(conversation(2).messages)
    start, end, middle = 100_264, 100_265, 100_266
    opening = [start, *b"user", middle, *b"t?", end, start, *b"assistant", middle]
    assert first == (opening, [*b"t0", end])
    assert second[0] == [*opening, *b"t0", end, start, *b"user", middle, *b"more", end, start, *b"assistant", middle]


def test_llama3():
    (request,) = chats("llama3").requests([Message("user", "q"), Message("assistant", "a")])
    start, middle, end = 128_006, 128_007, 128_009
    assert request[0] == [128_000, start, *b"user", middle, *b"\n\nq", end, start, *b"assistant", middle, *b"\n\n"]
    assert request[1] == [*b"a", end]


def test_special_tokens_count_in_rendered_prompts_only():
    text = "<|begin_of_text|>q<|eot_id|>"
    (request,) = chats("llama3").requests([Message(RENDERED, text), Message("assistant", text)])
    assert request == ([128_000, *b"q", 128_009], [*text.encode(), 128_009])


def test_a_downloaded_vocabulary_is_read(tmp_path):
    pytest.importorskip("tiktoken", reason="tiktoken (extra dev) is not installed")
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"abc"]
    lines = [base64.b64encode(token) + f" {rank}".encode() for rank, token in enumerate(tokens)]
    (tmp_path / "ranks").write_bytes(b"\n".join(lines) + b"\n")
    for name in VOCABULARIES:
        encoder = load_encoder(name, tmp_path / "ranks")
        assert encoder.encode_ordinary("abc abd 1234") == [257, 32, 256, *b"d 1234"]
    assert load_encoder("llama3", tmp_path / "ranks").encode("ab<|eot_id|>", allowed_special="all") == [256, 128_009]
    assert load_encoder("llama3", tmp_path / "ranks").encode_ordinary("<|eot_id|>") == [*b"<|eot_id|>"]


def test_turns_of_a_session_are_in_order_and_eight_sessions_run_at_once():
    arrays = convert([conversation(1 + number % 5, str(number)) for number in range(40)], chats(), Limits())
    sessions, turns = arrays["session"].tolist(), arrays["turn"].tolist()
    assert sorted({*sessions}) == [*range(40)]
    before = {}
    for index, (session, turn) in enumerate(zip(sessions, turns, strict=True)):
        assert turn == before.get(session, -1) + 1
        before[session] = turn
        running = {other for other in sessions[:index] if other in sessions[index:]}
        assert len(running | {session}) <= 8
    assert sessions != sorted(sessions)
    for session in range(40):
        prompts = [request for request, owner in zip(requests_of(arrays), sessions, strict=True) if owner == session]
        shared = arrays["shared_prefix"][arrays["session"] == session].tolist()
        assert shared == [0, *(len(prompt) + len(output) for prompt, output in prompts[:-1])]


def test_conversion_is_deterministic_and_keeps_every_request():
    made = [conversation(1, str(number)) for number in range(30)]
    first, second = (convert(made, chats(), Limits()) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert first["session"].tolist() == [*range(30)]
    outputs = [bytes(output[:-1]).decode() for _, output in requests_of(first)]
    assert sorted(outputs) == sorted(f"{number}0" for number in range(30))
    assert outputs != [f"{number}0" for number in range(30)]


def test_stages_follow_each_other_and_tasks_are_numbered_by_arrival():
    made = [conversation(1, str(number % 4), stage=number % 2) for number in range(20)]
    arrays = convert(made, chats(), Limits())
    tasks = [output[0] - ord("0") for _, output in requests_of(arrays)]
    assert [task % 2 for task in tasks] == [0] * 10 + [1] * 10
    numbers = list(dict.fromkeys(arrays["group"].tolist()))
    assert numbers == [*range(4)]
    assert len({*zip(tasks, arrays["group"].tolist(), strict=True)}) == 4


def test_an_output_that_was_cut_off_has_no_end_and_a_loop_is_left_out():
    rng = np.random.default_rng(0)
    long = "".join(map(chr, rng.integers(32, 127, 600)))
    made = [
        Conversation([Message("user", "q"), Message("assistant", output)], "t")
        for output in (long, "abcdefgh" * 80, "short")
    ]
    arrays = convert(made, chats(), Limits(output_tokens=600))
    found = sorted((output for _, output in requests_of(arrays)), key=len)
    assert found == [[*b"short", 100_265], [*long.encode()]]
    total = convert(made, chats(), Limits(total_tokens=10))
    assert len(total["prompt_len"]) == 2


def test_loops():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 1000, 2_000).tolist()
    assert not loops(text)
    assert not loops([])
    assert loops(text + [1, 2, 3] * 200)
    assert not loops(text + [1, 2, 3] * 20)


def test_files_without_outputs_are_an_error():
    with pytest.raises(ValueError, match="no outputs"):
        convert([Conversation([Message("user", "q")], "t")], chats(), Limits())
