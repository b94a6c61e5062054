"""Bearer tokens between real servers and clients."""

import grpc
import pytest

from drafter_service.auth.callers import sha256_of
from drafter_service.auth.connector import ClientAccess, Connector, read_token
from drafter_service.settings.tree import AccessConfig
from drafter_service.transport.address import Address
from ssd.errors import UserError
from tests.certificates import Authority, replace_file
from tests.drafter_service.guarded import Clock, caller_entry, guarded, run

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


def entry(name, token, *rights):
    return caller_entry(name, f"{name}-*", *(rights or ("read", "learn")), token=token)


@pytest.fixture
def callers(tmp_path):
    path = tmp_path / "callers.toml"
    path.write_text(entry("a", "secret-a") + entry("b", "secret-b") + entry("ops", "secret-ops", "admin"))
    return path


@pytest.fixture
def holding(tmp_path):
    """Return a function that returns the access of a client with a token."""

    def access(token, **further):
        path = tmp_path / f"{token}.token"
        path.write_text(f"{token}\n")
        return ClientAccess(token=path, **further)

    return access


@pytest.mark.parametrize("kind", ["loopback", "unix", "tls"])
@run
async def test_a_token_identifies_the_caller(kind, callers, holding, socket_address, tmp_path):
    config, further = AccessConfig(callers=callers), {}
    if kind == "tls":
        ca = Authority(tmp_path)
        pair = ca.server()
        config, further = AccessConfig(pair.certificate, pair.key, callers=callers), {"ca": ca.certificate}
    async with guarded(config, socket_address if kind == "unix" else "127.0.0.1:0") as service:
        assert await service.call("a-1", access=holding("secret-a", **further)) == "a"
        assert await service.call("b-1", "Learn", access=holding("secret-b", **further)) == "b"
        code, _ = await service.refusal("a-1", access=holding("guessed", **further))
        assert code == UNAUTHENTICATED


@run
async def test_missing_unknown_and_malformed_tokens_are_refused(callers):
    async with guarded(AccessConfig(callers=callers)) as service:

        async def details_of(*values):
            code, details = await service.refusal("a-1", metadata=[("authorization", value) for value in values])
            assert code == UNAUTHENTICATED
            return details

        assert (await details_of()).startswith("a bearer token is needed; give --token-file")
        assert await details_of("Bearer wrong") == "the bearer token is not known"
        assert await details_of(f"Bearer {sha256_of('secret-a')}") == "the bearer token is not known"
        for malformed in (["secret-a"], ["Basic secret-a"], ["Bearer "], ["Bearer secret-a", "Bearer secret-a"]):
            assert await details_of(*malformed) == "give one authorization of the form: Bearer TOKEN"
        assert await service.call("a-1", metadata=[("authorization", "bearer secret-a")]) == "a"


@run
async def test_without_a_callers_file_everybody_has_every_right(holding):
    async with guarded() as service:
        for right in ("Read", "Learn", "Admin"):
            assert await service.call("any", right) == "everybody"
        assert await service.call("any", access=holding("some")) == "everybody"


def test_client_reloads_a_changed_token(tmp_path):
    path = tmp_path / "token"
    path.write_text("old\n")
    clock = Clock()
    connector = Connector(Address.parse("127.0.0.1:1"), ClientAccess(token=path), clock=clock)
    assert connector.metadata() == (("authorization", "Bearer old"),)
    replace_file(path, "new\n")
    clock.now += 1
    assert connector.metadata() == (("authorization", "Bearer new"),)


@pytest.mark.parametrize("content", ["", "\n", "two words", "line\nline", "naïve"])
def test_file_without_a_token_is_refused_and_not_quoted(content, tmp_path):
    path = tmp_path / "t"
    path.write_text(content)
    with pytest.raises(UserError, match="does not contain exactly one token") as refused:
        read_token(path)
    assert not content.strip() or content.strip() not in str(refused.value)


def test_client_does_not_send_tokens_unencrypted_by_default(holding, tmp_path):
    remote = Address.parse("10.1.2.3:50051")
    with pytest.raises(UserError, match="unencrypted"):
        Connector(remote, holding("secret"))
    Connector(remote, holding("secret", allow_plaintext=True))
    Connector(remote, holding("secret", ca=Authority(tmp_path).certificate))
    Connector(remote, ClientAccess())
