"""The asyncio client over real sockets."""

import asyncio
import errno

import grpc
import pytest
from structlog.testing import capture_logs

from drafter_service.client import AsyncDrafterClient
from drafter_service.client.outgoing import Outgoing
from ssd.errors import UserError
from tests.drafter_service.client.test_client import NO_FRAMES, Failing, babbler
from tests.drafter_service.fake_server import TIMEOUT_S, FakeServer, FakeService, fake_server
from tests.replay import progress_of
from tests.strategies import array


def counting(text, limit):
    return list(range(text[-1] + 1, text[-1] + 1 + limit))


@pytest.fixture(params=[False, True], ids=["grpc", "steps"])
def drive(socket_address, request):
    """Runs a test's coroutine with a service, and a client that waits long, since the machine may be busy."""

    def run(test, **options):
        async def main():
            async with (
                fake_server(socket_address, FakeService(counting), has_steps=request.param) as fake,
                AsyncDrafterClient(socket_address, **{"deadline_s": TIMEOUT_S, "ahead": 0, **options}) as client,
            ):
                await test(fake, client)

        asyncio.run(asyncio.wait_for(main(), 2 * TIMEOUT_S))

    return run


async def eventually(condition):
    while not condition():
        await asyncio.sleep(0)


async def draft_of(client, committed, limit=1, **outcome):
    return (await client.draft(progress_of({1: committed}, limit, **outcome))).tokens.tolist()


def test_sequences_are_told_drafted_for_and_learned(drive):
    async def test(fake: FakeServer, client: AsyncDrafterClient):
        await client.start(1, array([5]), session_id="chat", request_id="r1")
        assert await draft_of(client, [], limit=2) == [6, 7]
        assert await draft_of(client, [6], limit=2, verified=2, accepted=1) == [7, 8]
        await client.finish(1, array([7]), verified=2, accepted=1)
        await client.start(2, array([9]), learn=False)
        await client.close()
        assert fake.service.learned == {"r1": [5, 6, 7]}
        assert fake.service.texts() == []
        assert fake.service.counters is not None
        assert (fake.service.drafted, fake.service.accepted) == (4, 2)

    drive(test)


def test_a_lost_connection_is_made_again(drive):
    news = []

    async def test(fake: FakeServer, client: AsyncDrafterClient):
        await client.start(1, array([5]))
        assert await draft_of(client, []) == [6]
        await fake.stop()
        await eventually(lambda: client.lost is not None)
        assert await draft_of(client, [6]) == []
        await fake.start()
        await eventually(lambda: client.lost is None)
        assert await draft_of(client, [7]) == [8]
        assert fake.service.texts() == [[5, 6, 7]]
        assert client.counters.reconnects == len(news) == 1

    drive(test, on_lost=news.append)


def test_a_late_answer_is_not_waited_for(drive):
    async def test(fake: FakeServer, client: AsyncDrafterClient):
        await client.start(1, array([5]))
        assert await draft_of(client, []) == [6]
        await fake.pause()
        client._deadline_s = 0.01
        assert await draft_of(client, [6]) == []
        client._deadline_s = TIMEOUT_S
        assert await draft_of(client, [7]) == []
        assert client.timeouts == 2
        await fake.resume()
        await eventually(lambda: client.counters.dropped == 1)
        assert await draft_of(client, [8]) == [9]

    drive(test)


def test_a_caller_that_gives_up_waiting_leaves_a_usable_client(drive):
    async def test(fake: FakeServer, client: AsyncDrafterClient):
        await client.start(1, array([5]))
        await fake.pause()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(draft_of(client, []), 0.01)
        await fake.resume()
        await eventually(lambda: client.counters.dropped == 1)
        assert await draft_of(client, [6]) == [7]

    drive(test)


def test_a_service_that_says_nothing_for_too_long_is_left(drive):
    news = []

    async def test(fake: FakeServer, client: AsyncDrafterClient):
        await client.start(1, array([5]))
        await fake.pause()
        client._deadline_s, client._patience_s = 0.01, 0.05
        while not news:
            assert await draft_of(client, []) == []
            await asyncio.sleep(0)
        assert "has not answered for" in news[0]
        client._deadline_s, client._patience_s = TIMEOUT_S, TIMEOUT_S
        await fake.resume()
        await eventually(lambda: client.lost is None)
        while await draft_of(client, []) != [6]:
            await asyncio.sleep(0)

    drive(test, on_lost=news.append)


def test_calls_from_several_tasks_take_turns(drive):
    async def test(fake: FakeServer, client: AsyncDrafterClient):
        async def request(number):
            await client.start(number, array([number]))
            for token in range(number + 1, number + 5):
                drafts = await client.draft(progress_of({number: [token]}, limit=1))
                assert drafts.tokens.tolist() == [token + 1]
            await client.finish(number, array([]))

        await asyncio.gather(*(request(number) for number in range(100, 900, 100)))
        await client.close()
        assert sorted(fake.service.learned.values()) == [
            list(range(number, number + 5)) for number in range(100, 900, 100)
        ]

    drive(test)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "this process cannot connect: Too many open files"),
        (RuntimeError("can't start new thread"), "this client failed: RuntimeError"),
    ],
)
@pytest.mark.parametrize("place", ["_open", "_greet"])
def test_a_failure_to_connect_passes(drive, problem, reason, place):
    async def test(fake: FakeServer, client: AsyncDrafterClient):
        await client.start(1, array([5]))
        assert await draft_of(client, []) == [6]
        failing = Failing(getattr(client, place), problem)
        setattr(client, place, failing)
        seen = set()
        with capture_logs() as logs:
            await fake.cut()
            await eventually(lambda: seen.add(client.lost) or not failing.times)
            await eventually(lambda: client.lost is None)
        assert reason in seen
        assert [log["problem"] for log in logs] == [type(problem).__name__] * 2
        while await draft_of(client, []) != [6]:
            await asyncio.sleep(0)

    drive(test)


def test_a_message_that_cannot_be_sent_ends_the_stream(drive, monkeypatch):
    async def test(fake: FakeServer, client: AsyncDrafterClient):
        await client.start(1, array([5]))
        failing = Failing(Outgoing.message, MemoryError())
        failing.times = 1
        monkeypatch.setattr(Outgoing, "message", lambda outgoing: failing(outgoing))
        await draft_of(client, [])
        await eventually(lambda: client.counters.reconnects == 1)

    drive(test)


def test_an_owner_that_fails_on_bad_news_keeps_its_client(drive):
    async def test(fake: FakeServer, client: AsyncDrafterClient):
        with capture_logs() as logs:
            await fake.cut()
            await eventually(lambda: client.counters.reconnects == 1 and client.lost is None)
        assert logs == [{"event": "on_lost raised", "log_level": "error", "problem": "ZeroDivisionError"}]

    drive(test, on_lost=lambda _: 1 / 0)


def test_an_owner_may_close_its_client_on_bad_news(drive):
    closing = []

    async def test(fake: FakeServer, client: AsyncDrafterClient):
        client._on_lost = lambda _: closing.append(asyncio.create_task(client.close()))
        await fake.cut()
        await eventually(lambda: closing and closing[0].done())
        closing[0].result()
        assert client._keeping.done()

    drive(test)


def test_what_the_connection_goes_over_is_said(drive):
    async def test(fake: FakeServer, client: AsyncDrafterClient):
        assert client.transport == client.counters.transport == ("socket" if fake.has_steps else "grpc")
        await client.close()
        assert client.transport == ""

    drive(test)


@pytest.mark.parametrize("kind", NO_FRAMES)
def test_bytes_that_are_no_frames_of_the_contract_are_met_by_a_new_client(socket_address, kind):
    data, reason = NO_FRAMES[kind]

    async def main(hellos):
        async with AsyncDrafterClient(socket_address, required=False) as client:
            await eventually(lambda: len(hellos) >= 2 and client.lost == f"it and this client disagree: {reason}")

    with babbler(socket_address, data) as hellos:
        asyncio.run(asyncio.wait_for(main(hellos), TIMEOUT_S))
    assert len({hello.client_id for hello in hellos}) == len(hellos)


def test_a_fork_is_told_to_make_a_client_of_its_own(drive, monkeypatch):
    async def test(fake: FakeServer, client: AsyncDrafterClient):
        await client.start(1, array([5]))
        monkeypatch.setattr(AsyncDrafterClient, "_is_fork", True)
        for call in (client.start(2, array([5])), draft_of(client, []), client.finish(1, array([6]))):
            with pytest.raises(UserError, match="make another one in each process"):
                await call
        await client.close()
        monkeypatch.undo()
        assert await draft_of(client, []) == [6]

    drive(test)


def test_a_refusal_is_final(socket_address):
    async def main():
        async with fake_server(socket_address, FakeService()) as fake:
            fake.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "another vocabulary")
            with pytest.raises(UserError, match="does not serve this client: another vocabulary"):
                async with AsyncDrafterClient(socket_address):
                    pass
            news = []
            async with AsyncDrafterClient(socket_address, required=False, on_lost=news.append) as client:
                await eventually(lambda: news)
                assert news == [client.lost] == ["another vocabulary"]
                await client.start(1, array([5]))
                assert await draft_of(client, []) == []

    asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))


def test_nobody_at_the_address(socket_address, monkeypatch):
    monkeypatch.setattr("drafter_service.client.aio.CONNECT_TIMEOUT_S", 0.2)

    async def main():
        async with AsyncDrafterClient(socket_address):
            pass

    with pytest.raises(UserError, match="no drafter answers"):
        asyncio.run(main())


def test_closing_does_not_wait_for_a_service_that_is_behind(drive):
    async def test(fake: FakeServer, client: AsyncDrafterClient):
        await client.start(1, array([5]))
        await fake.pause()
        client._deadline_s = 0.0
        assert await draft_of(client, []) == []
        await client.close()
        await fake.resume()

    drive(test)
