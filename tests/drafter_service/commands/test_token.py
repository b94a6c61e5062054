"""`ssd-drafter token`."""

import re

import pytest
from click.testing import CliRunner

from drafter_service.auth.callers import Right, read_callers, sha256_of
from drafter_service.commands.admin import token
from ssd.errors import UserError


def make(*arguments):
    return CliRunner().invoke(token, arguments)


def test_entry_accepts_the_token(tmp_path):
    made = make("--name", 'team "A" ü', "--namespaces", "a-*, shared", "--rights", "read,admin")
    assert made.exit_code == 0
    secret = made.stdout.strip()
    assert len(secret) >= 43
    assert secret not in made.stderr
    callers = tmp_path / "callers.toml"
    callers.write_text(made.stderr)
    caller = read_callers(callers, certificates=False).identify(sha256_of(secret), ())
    assert (caller.name, caller.namespaces, caller.rights) == (
        'team "A" ü',
        ("a-*", "shared"),
        Right.READ | Right.ADMIN,
    )


def test_tokens_are_unique():
    assert make("--name", "a", "--namespaces", "a").stdout != make("--name", "a", "--namespaces", "a").stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--name", "a", "--namespaces", "a", "--rights", "write"], r"--rights\[0\]: Input should be 'read'"),
        (["--name", "", "--namespaces", "a"], "--name: String should have at least 1 character"),
        (["--name", "a", "--namespaces", "a,"], r"--namespaces\[1\]: String should have at least 1 character"),
        (["--name", "a\x7f", "--namespaces", "a"], "Illegal character"),
    ],
)
def test_invalid_entries_are_refused_without_a_token(arguments, error):
    made = make(*arguments)
    assert isinstance(made.exception, UserError)
    assert made.stdout == ""
    assert re.search(error, str(made.exception))
