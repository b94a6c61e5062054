"""Rights, the callers file, and files that are reloaded."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from drafter_service.auth.callers import (
    EVERYBODY,
    Caller,
    Callers,
    PermissionDeniedError,
    Right,
    parse_callers,
    read_callers,
    sha256_of,
)
from drafter_service.auth.watched import Watched
from drafter_service.settings.tree import AccessConfig
from ssd.errors import UserError
from tests.certificates import replace_file
from tests.drafter_service.guarded import Clock

HASH = sha256_of("secret")
ENTRY = f'[[caller]]\nname = "a"\ntoken_sha256 = "{HASH}"\nnamespaces = ["a-*", "shared"]\nrights = ["read", "learn"]\n'


def test_patterns_match_the_whole_name():
    caller = Caller("a", ("a-*", "shared"), Right.READ)
    names = ["a-1", "a-", "a-1\nb", "shared", "a", "A-1", "b-a-1", "b\na-1", "shared2", ""]
    assert [name for name in names if caller.may(Right.READ, name)] == names[:4]


def test_all_requested_rights_are_required():
    caller = Caller("a", ("*",), Right.READ | Right.LEARN)
    assert caller.may(Right.READ | Right.LEARN, "x")
    assert not caller.may(Right.READ | Right.ADMIN, "x")
    with pytest.raises(PermissionDeniedError, match="no read/admin right"):
        caller.require(Right.READ | Right.ADMIN, "x")
    with pytest.raises(PermissionDeniedError) as refused:
        caller.require(Right.ADMIN, "b" * 1_000_000)
    assert len(str(refused.value)) < 200
    assert all(EVERYBODY.may(right, "x") for right in Right)


def test_example_in_the_documentation_is_valid():
    from drafter_service.auth import callers

    example = "\n".join(line for line in callers.__doc__.splitlines() if line.startswith("    "))
    entries = parse_callers(example.replace("    ", ""), certificates=True)
    assert [(entry.caller.name, entry.caller.rights) for entry in entries] == [
        ("team-a", Right.READ | Right.LEARN),
        ("operations", Right.ADMIN),
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "caller: Field required"),
        ("caller = []", "caller: List should have at least 1 item"),
        (ENTRY.replace('"learn"', '"write"'), r"caller\[0\].rights\[1\]: Input should be 'read', 'learn' or 'admin'"),
        (ENTRY.replace(HASH, "secret"), r"caller\[0\].token_sha256: String should match"),
        (ENTRY.replace('["a-*", "shared"]', "[]"), r"caller\[0\].namespaces: List should have at least 1"),
        (ENTRY.replace("namespaces", "namespace"), r"caller\[0\].namespaces: Field required"),
        (ENTRY + "token = 1", r"caller\[0\].token: Extra inputs are not permitted"),
        (ENTRY + 'certificate = "x"', r"caller\[0\]: give either token_sha256 or certificate"),
        (ENTRY.replace(f'token_sha256 = "{HASH}"', ""), r"caller\[0\]: give either token_sha256 or certificate"),
        (ENTRY.replace(f'token_sha256 = "{HASH}"', 'certificate = "x"'), r"caller\[0\].certificate: .* client_ca"),
        (ENTRY + ENTRY, r"caller\[1\].token_sha256: already used by caller\[0\]"),
        ("[[caller]", "line 1"),
    ],
)
def test_errors_name_the_key_and_quote_no_value(text, complaint, tmp_path):
    path = tmp_path / "callers.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=complaint) as caught:
        read_callers(path, certificates=False)
    assert str(caught.value).startswith(f"callers: {path}: ")
    assert "secret" not in str(caught.value)


def test_world_writable_callers_file_is_refused(tmp_path):
    path = tmp_path / "callers.toml"
    path.write_text(ENTRY)
    path.chmod(0o664)
    read_callers(path, certificates=False)
    path.chmod(0o666)
    with pytest.raises(UserError, match="writable by everybody"):
        read_callers(path, certificates=False)
    with pytest.raises(UserError, match=r"cannot read .*: No such file"):
        read_callers(tmp_path / "missing", certificates=False)


def test_two_tokens_of_a_caller_are_valid_at_the_same_time():
    entries = parse_callers(ENTRY + ENTRY.replace(HASH, sha256_of("new")), certificates=False)
    assert {Callers(entries).identify(each, ()).name for each in (HASH, sha256_of("new"))} == {"a"}


@given(st.text(max_size=200))
def test_any_other_text_is_a_user_error(text):
    with pytest.raises((ValueError, UserError)):
        parse_callers(text, certificates=True)


def test_changed_files_are_reloaded_at_most_once_a_second(tmp_path, caplog):
    path, clock, reads, problems = tmp_path / "f", Clock(), [], []

    def read():
        reads.append(path.read_text())
        if problems:
            raise problems.pop()
        return reads[-1]

    path.write_text("one")
    watched = Watched([path], read, clock=clock)
    replace_file(path, "two")
    clock.now = 0.9
    assert watched.current() == "one"
    clock.now = 1.0
    assert watched.current() == "two"
    clock.now = 2.0
    assert watched.current() == "two"
    assert reads == ["one", "two"]
    replace_file(path, "three")
    problems += [UserError("f: cannot read: Too many open files")] * 3
    for clock.now, contents in ((3.0, "two"), (4.0, "two"), (5.0, "two"), (6.0, "three")):
        assert watched.current() == contents
    assert caplog.text.count("Too many open files") == 1  # Logged once, not every second.
    path.unlink()
    clock.now = 7.0
    assert watched.current() == "three"
    path.write_text("four")
    clock.now = 8.0
    assert watched.current() == "four"


def test_files_that_are_checked_elsewhere_are_not_touched_by_uses(tmp_path):
    path, clock = tmp_path / "f", Clock()
    path.write_text("one")
    watched = Watched([path], path.read_text, check_interval_s=math.inf, clock=clock)
    replace_file(path, "two")
    clock.now = 1e9
    assert watched.current() == "one"
    watched.check()
    assert watched.current() == "two"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"certificate": "c"}, "certificate needs key"),
        ({"key": "k"}, "key needs certificate"),
        ({"client_ca": "c"}, "client_ca needs certificate"),
        ({"socket_mode": "rw-"}, "socket_mode must be octal"),
        ({"socket_mode": "0888"}, "socket_mode must be octal"),
        ({"socket_mode": "04755"}, "socket_mode must be octal"),
        ({"socket_mode": 600}, "socket_mode\n  Input should be a valid string"),
        ({"socket_mode": "0077"}, "excludes the server's own user"),
    ],
)
def test_contradictory_settings_are_refused_with_their_key(settings, complaint):
    with pytest.raises(ValidationError, match=complaint):
        TypeAdapter(AccessConfig).validate_python(settings)


def test_settings_accept_values_of_a_file():
    config = TypeAdapter(AccessConfig).validate_python({"certificate": "c", "key": "k", "socket_mode": "660"})
    assert config.has_tls
    assert config.socket_permissions == 0o660
    assert AccessConfig().socket_permissions == 0o600
