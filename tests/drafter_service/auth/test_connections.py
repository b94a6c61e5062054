"""Callers identified by bearer tokens and certificates, between real servers and clients."""

import grpc
import pytest

from drafter_service.auth.callers import sha256_of
from drafter_service.auth.connector import ClientAccess, Connector, read_token
from drafter_service.auth.listening import server_credentials
from drafter_service.settings.tree import AccessConfig
from drafter_service.transport.address import Address
from ssd.errors import UserError
from tests.certificates import Authority, encrypt_key, replace_file
from tests.drafter_service.guarded import Clock, caller_entry, guarded, open_aio, run

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


@run
async def test_callers_keep_their_rights_when_the_file_is_damaged(callers, holding, caplog):
    async with guarded(AccessConfig(callers=callers), clock=Clock()) as service:
        replace_file(callers, "[[caller]]\nname = ")
        service.clock.now += 1
        assert await service.call("a-1", access=holding("secret-a")) == "a"
        assert "callers.toml" in caplog.text
        assert "remain in force" in caplog.text


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


CALLERS = """
[[caller]]
name = "team-a"
certificate = "engine-a"
namespaces = ["a-*"]
rights = ["read"]

[[caller]]
name = "team-b"
certificate = "spiffe://example.org/b"
namespaces = ["b-*"]
rights = ["read"]
"""


@pytest.fixture
def ca(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def other_ca(tmp_path):
    return Authority(tmp_path, "other")


def tls(ca, pair, **further):
    return AccessConfig(certificate=pair.certificate, key=pair.key, **further)


def trusting(ca, pair=None, **further):
    mine = {} if pair is None else {"certificate": pair.certificate, "key": pair.key}
    return ClientAccess(ca=ca.certificate, **mine, **further)


@run
async def test_clients_connect_if_they_trust_the_ca_and_the_name(ca, other_ca, socket_address):
    named = tls(ca, ca.server("named", names=["drafter.example.org"]))
    for config, address, access, is_connected in (
        (tls(ca, ca.server()), "127.0.0.1:0", trusting(ca), True),
        (tls(ca, ca.server()), "127.0.0.1:0", trusting(other_ca), False),
        (tls(ca, ca.server()), "127.0.0.1:0", ClientAccess(), False),
        (tls(ca, ca.server()), socket_address, trusting(ca), True),
        (tls(ca, ca.server()), socket_address, ClientAccess(), False),
        (named, "127.0.0.1:0", trusting(ca), False),
        (named, "127.0.0.1:0", trusting(ca, server_name="drafter.example.org"), True),
        (tls(ca, ca.server("expired", expired=True)), "127.0.0.1:0", trusting(ca), False),
    ):
        async with guarded(config, address) as service:
            assert await service.is_connected(access) == is_connected, (address, access)


@run
async def test_mutual_tls_requires_a_client_certificate(ca, other_ca):
    async with guarded(tls(ca, ca.server(), client_ca=ca.certificate)) as service:
        assert await service.is_connected(trusting(ca, ca.client("engine-a")))
        assert not await service.is_connected(trusting(ca))
        assert not await service.is_connected(trusting(ca, ca.client("engine-a", expired=True)))
        assert not await service.is_connected(trusting(ca, other_ca.client("engine-a")))


@run
async def test_client_certificate_identifies_the_caller(ca, tmp_path):
    callers = tmp_path / "callers.toml"
    callers.write_text(CALLERS)
    async with guarded(tls(ca, ca.server(), client_ca=ca.certificate, callers=callers)) as service:
        engine_a = trusting(ca, ca.client("engine-a"))
        assert await service.call("a-1", access=engine_a) == "team-a"
        code, _ = await service.refusal("b-1", access=engine_a)
        assert code == grpc.StatusCode.PERMISSION_DENIED

        engine_b = trusting(ca, ca.client("whatever", uri="spiffe://example.org/b"))
        assert await service.call("b-1", access=engine_b) == "team-b"
        code, details = await service.refusal("b-1", access=trusting(ca, ca.client("stranger")))
        assert (code, details) == (UNAUTHENTICATED, "the certificate names no known caller")
        # A token takes precedence over the certificate, valid or not.
        wrong = (("authorization", "Bearer wrong"),)
        assert (await service.refusal("a-1", access=engine_a, metadata=wrong))[0] == UNAUTHENTICATED


@run
async def test_a_renewed_certificate_applies_to_the_next_connection_once_it_is_complete(ca, other_ca, caplog):
    pair, renewed = ca.server(), other_ca.server("renewed")
    async with guarded(tls(ca, pair)) as service, open_aio(Connector(service.address, trusting(ca))) as channel:
        read = channel.unary_unary("/test.Guarded/Read")
        await read(b"any", timeout=10)
        replace_file(pair.certificate, renewed.certificate.read_text())
        assert await service.is_connected(trusting(ca))
        assert "not a pair" in caplog.text
        replace_file(pair.key, renewed.key.read_text())
        assert await service.is_connected(trusting(other_ca))
        assert await read(b"any", timeout=10) == b"everybody"  # An open connection continues.
        assert not await service.is_connected(trusting(ca))
        pair.certificate.unlink()
        assert await service.is_connected(trusting(other_ca))
        assert "cannot read" in caplog.text
        pair.replace_by(ca.server("again"))
        assert await service.is_connected(trusting(ca))


@run
async def test_renewed_client_ca_applies_to_the_next_connection(ca, other_ca, tmp_path):
    client_ca = tmp_path / "client_ca.pem"
    client_ca.write_bytes(ca.certificate.read_bytes())
    old, new = trusting(ca, ca.client("old")), trusting(ca, other_ca.client("new"))
    async with guarded(tls(ca, ca.server(), client_ca=client_ca)) as service:
        assert await service.is_connected(old)
        assert not await service.is_connected(new)
        replace_file(client_ca, other_ca.certificate.read_text())
        assert await service.is_connected(new)
        assert not await service.is_connected(old)


def test_server_names_unusable_files_at_start(ca, tmp_path):
    def complaint(**changed):
        with pytest.raises(UserError) as caught:
            server_credentials(AccessConfig(**{"certificate": pair.certificate, "key": pair.key, **changed}))
        return str(caught.value)

    pair = ca.server()
    empty = tmp_path / "empty.pem"
    empty.touch()
    missing = tmp_path / "missing.pem"
    assert f"key: cannot read {missing}: No such file" in complaint(key=missing)
    assert "KEY_VALUES_MISMATCH" in complaint(key=ca.client("other").key)
    assert "not a pair in PEM form" in complaint(certificate=empty)
    assert f"client_ca: {empty} has no certificates" in complaint(client_ca=empty)
    encrypt_key(pair.key, b"secret")
    assert "not a pair in PEM form" in complaint()


def test_client_names_unusable_files(ca, tmp_path):
    address = Address.parse("127.0.0.1:1")
    with pytest.raises(UserError, match="ca: cannot read"):
        Connector(address, ClientAccess(ca=tmp_path / "missing.pem"))
    with pytest.raises(UserError, match="not a pair in PEM form"):
        Connector(address, ClientAccess(ca.certificate, ca.client("a").certificate, ca.client("b").key))
    with pytest.raises(ValueError, match="certificate needs key"):
        ClientAccess(ca=ca.certificate, certificate=ca.certificate)
