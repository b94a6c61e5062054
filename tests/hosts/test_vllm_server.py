"""The plug-in in vLLM's OpenAI server, driven by the `openai` client, on a CPU: `make hosts`.

Each call is made to a server without drafts, and in two passes to one with drafts. The answers must be equal.
"""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import threading
from contextlib import ExitStack, contextmanager

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make hosts` runs these tests", allow_module_level=True)

import openai

from tests.drafter_service.raw import eventually
from tests.hosts.test_vllm import has_only_losses, prompts, report
from tests.hosts.vllm_files import CHAT_TEMPLATE, make_adapter, make_correction
from tests.hosts.vllm_server import DEADLINE_S, vllm_server
from tests.servers import served

AT_ONCE = 128
CLIENT_TIMEOUT_S = 240
SERVER_FLAGS = (
    *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--max-num-seqs", str(AT_ONCE), "--max-num-batched-tokens", "1536", "--block-size", "32"),
    *("--num-gpu-blocks-override", "600"),  # Too few for 128 requests, so that some are preempted.
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "number": {"type": "integer"}},
    "required": ["name", "number"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": SCHEMA}}]
MESSAGES = [{"role": "user", "content": "Write a function.\ndef f(x):"}]
ALMOST_GREEDY = {"temperature": 1.0, "top_p": 1e-5}
"""vLLM refuses n > 1 with a temperature of 0, and for CPUs seeds with any other temperature."""


async def ask(server, make):
    """Return what a coroutine function of a client returns for a server."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=CLIENT_TIMEOUT_S
    ) as client:
        return await make(client)


class Servers:
    """The two servers and the sidecar of one of them."""

    def __init__(self, plain, drafting, start_sidecar):
        self.plain, self.drafting = plain, drafting
        self._start_sidecar = start_sidecar
        self.restart_sidecar()

    def restart_sidecar(self):
        self.sidecar = self._start_sidecar()

    def answers(self, make, passes=2):
        """Return what a coroutine function of a client returns for the server without drafts, and for the other."""
        drafted = [asyncio.run(ask(self.drafting, make)) for _ in range(passes)]
        return asyncio.run(ask(self.plain, make)), drafted

    def accepted(self):
        return sum(self.drafting.metrics("spec_decode_num_accepted_tokens_total"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def address(folder):
    return f"unix:{folder}/drafter.sock"


@pytest.fixture(scope="module")
def servers(folder, address):
    (folder / "template.jinja").write_text(CHAT_TEMPLATE)
    adapters = [f"{name}={make_adapter(folder / name, seed)}" for seed, name in enumerate("ab")]
    flags = [*SERVER_FLAGS, "--lora-modules", *adapters, "--chat-template", str(folder / "template.jinja")]
    environment = {"PYTHONPATH": str(make_correction(folder / "correction"))}
    with ExitStack() as stack:

        def start_sidecar():
            return stack.enter_context(served("--listen", address, "--capacity", "200k", "--max-draft", "16"))

        plain = stack.enter_context(vllm_server(folder, *flags, **environment))
        flags += ["--per-request-spec-decode-metrics", "summary"]  # Refused without drafts.
        drafting = stack.enter_context(vllm_server(folder, *flags, sidecar=address, **environment))
        running = Servers(plain, drafting, start_sidecar)
        plain.await_ready()
        drafting.await_ready()
        wait_for_drafts(running)  # The plug-in looks again for a sidecar that was compiling its kernels.
        yield running


# Answers without what differs in each request, such as ids and times.


async def complete(client, prompt, model="base", **options):
    options = {"temperature": 0.0, "max_tokens": 64, **options}
    answer = await client.completions.create(model=model, prompt=prompt, **options)
    choices = [
        (choice.text, choice.finish_reason, choice.logprobs and choice.logprobs.tokens) for choice in answer.choices
    ]
    return choices, answer.usage.completion_tokens, answer.usage.prompt_tokens


async def chat(client, **options):
    options = {"temperature": 0.0, "max_tokens": 64, "messages": MESSAGES, **options}
    answer = await client.chat.completions.create(model="base", **options)
    return [
        (
            choice.message.content,
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []],
            choice.finish_reason,
        )
        for choice in answer.choices
    ]


UNREPEATED = {"frequency_penalty": 2.0, "presence_penalty": 2.0}
"""Options with which outputs hardly repeat themselves, so that drafts come from elsewhere."""


async def predicted(client, hints):
    """Return the text of a completion with hints, and the counts in its response."""
    answer = await client.completions.create(
        model="base",
        prompt=prompts()[18],  # No other test has its output learned.
        temperature=0.0,
        max_tokens=64,
        extra_body={"vllm_xargs": {"hints": hints, "ssd_private": 1}},
        **UNREPEATED,
    )
    return answer.choices[0].text, answer.model_extra["metrics"]["speculative_decoding"]


def test_hints_are_texts_and_responses_have_counts(servers):
    async def passes(client):
        text, first = await predicted(client, "日本語")
        again = [await predicted(client, hints) for hints in (text, ["<|im_end|>", text], "x" * 10_000_000)]
        return [text, *(other for other, _ in again)], [first, *(counts for _, counts in again)]

    texts, counts = asyncio.run(ask(servers.drafting, passes))
    assert {*texts} == {texts[0]}
    accepted = [each["num_accepted_draft_tokens"] for each in counts]
    assert all(each["num_draft_tokens"] >= each["num_accepted_draft_tokens"] for each in counts)
    assert min(accepted[1:3]) > accepted[0]


async def stream(client, prompt, **options):
    """Return the text of a streamed completion."""
    options = {"temperature": 0.0, "max_tokens": 64, **options}
    chunks = await client.completions.create(model="base", prompt=prompt, stream=True, **options)
    texts = [chunk.choices[0].text async for chunk in chunks if chunk.choices]
    return "".join(texts)


async def stream_chat(client, **options):
    options = {"temperature": 0.0, "max_tokens": 64, "messages": MESSAGES, **options}
    chunks = await client.chat.completions.create(model="base", stream=True, **options)
    text, calls = [], []
    async for chunk in chunks:
        for choice in chunk.choices:
            text.append(choice.delta.content or "")
            calls += [
                (call.index, call.function.name, call.function.arguments) for call in choice.delta.tool_calls or []
            ]
    arguments = "".join(fragment or "" for _, _, fragment in calls)
    return "".join(text), [name for _, name, _ in calls if name], arguments


def completion(number, *, model="base", **options):
    return lambda client: complete(client, prompts()[number], model, **options)


CALLS = {
    "completion": completion(0),
    "several choices": completion(1, n=3, **ALMOST_GREEDY),
    "stop strings": completion(2, stop=["\n\n", "self."]),
    "min_tokens": completion(3, stop=["\n"], extra_body={"min_tokens": 40}),
    "penalties": completion(4, frequency_penalty=0.5, presence_penalty=0.3, extra_body={"repetition_penalty": 1.1}),
    "seed of a greedy request": completion(5, seed=7),
    "bad words": completion(6, extra_body={"bad_words": ["self"]}),
    "allowed tokens": completion(7, extra_body={"allowed_token_ids": list(range(1, 2000))}),
    "adapter": completion(8, model="a"),
    "cache salt": completion(9, extra_body={"cache_salt": "tenant"}),
    "regular expression": completion(11, extra_body={"structured_outputs": {"regex": "[a-z]{3,8}=[0-9]{4}"}}),
    "grammar": completion(12, extra_body={"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}),
    "several prompts": lambda client: complete(client, prompts()[13:16]),
    "long prompt in chunks": lambda client: complete(client, "".join(prompts())[:2000], max_tokens=32),
    "stream": lambda client: stream(client, prompts()[16]),
    "chat": chat,
    "chat stream": stream_chat,
    "JSON schema": lambda client: chat(
        client, response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    ),
    "required tool": lambda client: chat(client, tools=TOOLS, tool_choice="required"),
    "named tool": lambda client: chat(
        client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "search"}}
    ),
    "tool stream": lambda client: stream_chat(client, tools=TOOLS, tool_choice="required"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_answered_as_without_drafts(servers, name):
    plain, drafted = servers.answers(CALLS[name])
    assert drafted == [plain] * 2


def test_log_probabilities_of_a_prompt(servers):
    """Alone: with other requests, an engine of vLLM 0.32 for CPUs that has adapters stops, without drafts too."""
    plain, drafted = servers.answers(completion(10, echo=True, logprobs=2, max_tokens=16))
    assert drafted == [plain] * 2


def test_log_probabilities(servers):
    async def log_probabilities(client):
        answer = await client.completions.create(
            model="base", prompt=prompts()[17], temperature=0.0, max_tokens=64, logprobs=3
        )
        return answer.choices[0].logprobs

    accepted = servers.accepted()
    plain, drafted = servers.answers(log_probabilities)
    assert servers.accepted() > accepted
    for answer in drafted:
        assert answer.tokens == plain.tokens
        assert answer.token_logprobs == pytest.approx(plain.token_logprobs, abs=1e-4)
        for top, plain_top in zip(answer.top_logprobs, plain.top_logprobs, strict=True):
            assert top == pytest.approx(plain_top, abs=1e-4)


@pytest.mark.parametrize("options", [{"logit_bias": {"5": 3}}, {"extra_body": {"min_p": 0.1}}])
def test_vllm_refuses_options_with_speculation(servers, options):
    answer = completion(0, **ALMOST_GREEDY, **options)
    with pytest.raises(openai.BadRequestError, match="not yet supported with speculative decoding"):
        asyncio.run(ask(servers.drafting, answer))


async def everything(client):
    """Make all calls at once, three times, apart from one.

    vLLM 0.32 for CPUs applies an adapter to other requests of its batch as well, without drafts too.
    """
    return await asyncio.gather(*(call(client) for _ in range(3) for name, call in CALLS.items() if name != "adapter"))


def test_all_calls_at_once(servers):
    plain, drafted = servers.answers(everything)
    assert drafted == [plain] * 2


async def crowd(client):
    """Make 128 requests at once, most of them different."""
    texts = [(prompt + other)[-600:] for prompt in prompts()[:12] for other in prompts()[:11]][:AT_ONCE]
    return await asyncio.gather(*(complete(client, text, max_tokens=96) for text in texts))


def test_128_requests_at_once_with_preemptions_and_cached_prefixes(servers):
    accepted = servers.accepted()
    plain, drafted = servers.answers(crowd)
    assert drafted == [plain] * 2
    assert servers.accepted() > accepted
    assert servers.drafting.metrics("num_preemptions_total") > [0]
    assert servers.drafting.metrics("prefix_cache_hits_total") > [0]


def test_canceled_streams_leave_the_others_alone(servers):
    async def cancel_some(client):
        async def cancel(prompt):
            chunks = await client.completions.create(
                model="base", prompt=prompt, temperature=0.0, max_tokens=512, stream=True
            )
            await anext(aiter(chunks))
            await chunks.close()

        others = asyncio.gather(*(complete(client, prompt) for prompt in prompts()[:8]))
        await asyncio.gather(*(cancel(prompt) for prompt in prompts()[8:]))
        return await others

    plain, drafted = servers.answers(cancel_some)
    assert drafted == [plain] * 2
    eventually(lambda: servers.drafting.metrics("num_requests_running") == [0])


def test_salts_and_adapters_have_corpora_of_their_own(servers, address):
    """A text that one tenant has produced is not drafted for another, and is drafted for the first."""

    def accepted_of(**options):
        before = servers.accepted()
        for number in range(12, 17):
            asyncio.run(ask(servers.drafting, completion(number, max_tokens=96, **UNREPEATED, **options)))
        return servers.accepted() - before

    def salted(salt):
        return accepted_of(extra_body={"cache_salt": salt})

    first, others, again = salted("tenant-1"), [salted("tenant-2"), salted("tenant-3")], salted("tenant-1")
    assert again > 1.3 * first  # All outputs are known.
    assert max(others) < (first + again) / 2
    names = {namespace["name"] for namespace in report(address)["namespaces"]}
    accepted_of(model="b")
    assert len({namespace["name"] for namespace in report(address)["namespaces"]} - names) == 1


async def load(client):
    """Make 40 requests, 16 at a time, some of which have a salt."""
    limit = asyncio.Semaphore(16)

    async def limited(number):
        options = {"extra_body": {"cache_salt": "tenant"}} if number % 5 == 1 else {}
        async with limit:
            return await complete(client, prompts()[number % 20], **options)

    return await asyncio.gather(*(limited(number) for number in range(40)))


@contextmanager
def during(disturb):
    """Run a function in another thread."""
    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def wait_for_drafts(servers):
    """Make requests until one has accepted draft tokens."""
    before = servers.accepted()

    def has_drafts():
        asyncio.run(ask(servers.drafting, CALLS["completion"]))
        return servers.accepted() > before

    eventually(has_drafts, timeout_s=120)


def wait_for_requests(servers):
    eventually(lambda: servers.drafting.metrics("num_requests_running") > [0])


def test_a_killed_sidecar_costs_drafts_only(servers):
    wait_for_drafts(servers)
    logged = len(servers.drafting.warnings())

    def kill():
        wait_for_requests(servers)
        servers.sidecar.kill()

    with during(kill):
        plain, drafted = servers.answers(load)
    assert drafted == [plain] * 2
    servers.restart_sidecar()
    wait_for_drafts(servers)
    asyncio.run(ask(servers.drafting, load))  # A connection is reported after some responses.
    lines = servers.drafting.warnings()[logged:]
    assert has_only_losses(lines)
    assert "drafting resumes" in lines[-1]


def accepted_of_load(servers):
    """Run the load with drafts; return its answers, and how many draft tokens were accepted."""
    before = servers.accepted()
    answers = asyncio.run(ask(servers.drafting, load))
    return answers, servers.accepted() - before


def test_a_sidecar_that_hangs_or_answers_too_late_costs_drafts_only(servers):
    wait_for_drafts(servers)
    plain, undisturbed = accepted_of_load(servers)
    stopping = threading.Event()

    def disturb(seconds):
        """Let the sidecar run for 20 ms after each interval of this length."""
        wait_for_requests(servers)
        while not stopping.is_set():
            servers.sidecar.send_signal(signal.SIGSTOP)
            stopping.wait(seconds)
            servers.sidecar.send_signal(signal.SIGCONT)
            stopping.wait(0.02)

    for seconds in (CLIENT_TIMEOUT_S, DEADLINE_S + 0.2):
        stopping.clear()
        with during(lambda seconds=seconds: disturb(seconds)):
            try:
                answers, accepted = accepted_of_load(servers)
            finally:
                stopping.set()
        assert answers == plain
        assert accepted < undisturbed  # Also on a busy machine, where the sidecar runs for longer than 20 ms.


@pytest.mark.parametrize(
    ("flag", "drafting"), [("--tensor-parallel-size", "sidecar"), ("--data-parallel-size", "replica")]
)
def test_two_workers_with_one_sidecar(servers, folder, address, flag, drafting):
    plain, _ = servers.answers(load, passes=0)
    with vllm_server(folder, flag, "2", sidecar=address, drafting=drafting, VLLM_CPU_OMP_THREADS_BIND="0|1") as server:
        server.await_ready()
        assert [asyncio.run(ask(server, load)) for _ in range(2)] == [plain] * 2
        accepted = server.metrics("spec_decode_num_accepted_tokens_total")
        assert len(accepted) == (2 if flag == "--data-parallel-size" else 1)
        assert min(accepted) > 0
        assert not server.warnings()
