"""Sources of settings, their precedence, and error messages."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.settings.flags import parse_quantity, unwrapped
from drafter_service.settings.tree import SETTINGS, NamespacesConfig, ServiceConfig, load_settings, read_assignments
from ssd.errors import UserError
from tests.strategies import examples

LEAVES = [key for key in SETTINGS.settings if not key.endswith((".capacities", ".reads"))]
RANGES = {
    "drafting.capacity": 5000,
    "drafting.max_draft": 9,
    "drafting.match_depth": 16,
    "access.socket_mode": "660",
}
"""Values of settings that do not take any value of their type."""


def loaded(file=None, flags=None, environment=None):
    return load_settings(file, flags, environment or {})


def value_of(config, key):
    for part in key.split("."):
        config = getattr(config, part)
    return config


def different(key):
    """Return a value of a setting that is not its default."""
    setting = SETTINGS.settings[key]
    kind, _ = unwrapped(setting.kind)
    if get_origin(kind) is Literal:
        return next(each for each in get_args(kind) if each != setting.default)
    of_type = {bool: not setting.default, int: 4321, float: 0.25, str: "text", Path: Path("/file")}
    return RANGES.get(key) or next(value for each, value in of_type.items() if each in _parts(kind))


def _parts(kind):
    """Return the types in a union and in annotations."""
    return {kind}.union(*map(_parts, get_args(kind)))


def test_every_setting_is_read_from_flags_environment_and_file(tmp_path):
    values = {key: different(key) for key in LEAVES}
    texts = {key: str(value) for key, value in values.items()}
    by_flag = loaded(flags=read_assignments([f"{key}={text}" for key, text in texts.items()]))
    variables = {"SSD_DRAFTER_" + key.upper().replace(".", "__"): text for key, text in texts.items()}
    for key, value in values.items():
        assert value_of(by_flag, key) == value, key
        assert value != value_of(ServiceConfig(), key)
    assert loaded(environment=variables) == by_flag
    (tmp_path / "settings.toml").write_text(SETTINGS.to_toml(by_flag))
    assert loaded(tmp_path / "settings.toml") == by_flag


def test_flags_override_the_environment_which_overrides_the_file(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text("[limits]\nstreams = 1\nsequences = 1\nwaiting_tokens = 1\n")
    environment = {"SSD_DRAFTER_LIMITS__SEQUENCES": "2", "SSD_DRAFTER_LIMITS__WAITING_TOKENS": "2"}
    limits = loaded(file, {"limits.waiting_tokens": 3}, environment).limits
    assert (limits.streams, limits.sequences, limits.waiting_tokens) == (1, 2, 3)


def test_variables_of_kubernetes_are_ignored():
    """Kubernetes sets these in every pod if there is a Service named ssd-drafter."""
    environment = {
        "HOME": "/root",
        "SSD_DRAFTER_SERVICE_HOST": "10.0.0.1",
        "SSD_DRAFTER_SERVICE_PORT": "50051",
        "SSD_DRAFTER_SERVICE_PORT_GRPC": "50051",
        "SSD_DRAFTER_PORT": "tcp://10.0.0.1:50051",
        "SSD_DRAFTER_PORT_50051_TCP_ADDR": "10.0.0.1",
        "SSD_DRAFTER_SNAPSHOTS__FOLDER": "",
    }
    assert loaded(environment=environment) == ServiceConfig()


def test_an_empty_text_is_no_value(tmp_path):
    file = tmp_path / "settings.toml"
    printed = SETTINGS.to_toml(ServiceConfig())
    file.write_text(re.sub(r'^#(?=\w+ = ""$)', "", printed, flags=re.MULTILINE))
    assert '\nfolder = ""' in file.read_text()
    assert loaded(file) == ServiceConfig()


def test_entries_of_tables_are_assigned_by_name():
    by_flag = loaded(flags=read_assignments(["namespaces.capacities.Qwen2.5=1M", 'namespaces.reads.a=["b", "c"]']))
    by_variable = loaded(
        environment={
            "SSD_DRAFTER_NAMESPACES__CAPACITIES": "{'Qwen2.5' = '1M'}",
            "SSD_DRAFTER_NAMESPACES__READS__A": '["b", "c"]',
        }
    )
    expected = NamespacesConfig(capacities={"Qwen2.5": 1_000_000}, reads={"a": ("b", "c")})
    assert by_flag.namespaces == by_variable.namespaces == expected


def test_integers_may_have_suffixes(tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text('[drafting]\ncapacity = "32M"\n[namespaces.capacities]\n"Llama-3.1" = "500k"\nother = 5000\n')
    config = loaded(file, {"limits.streams": "2k"})
    assert (config.drafting.capacity, config.limits.streams) == (32_000_000, 2000)
    assert dict(config.namespaces.capacities) == {"Llama-3.1": 500_000, "other": 5000}
    from_table = loaded(flags=read_assignments(["namespaces.capacities={'Llama-3.1' = '500k'}"]))
    assert dict(from_table.namespaces.capacities) == {"Llama-3.1": 500_000}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"nonsense": 1}, "flags: there is no setting nonsense; known are listen, drafting"),
        ({"drafting.capcity": 1}, "flags: there is no setting drafting.capcity; did you mean drafting.capacity?"),
        ({"drafting": 5}, "flags: drafting is a section, not a value"),
        ({"drafting": {"cost": 1}, "drafting.options.a": 5}, "flags: there is no setting drafting.options.a"),
        ({"drafting.capacity": "many"}, "drafting.capacity: 'many' is not a number"),
        ({"drafting.capacity": 5}, "drafting.capacity: a corpus holds 4,096 to"),
        ({"drafting.max_draft": 100}, "drafting: max_draft must be 1 to 64, not 100"),
        ({"drafting.cost": "nan"}, "drafting: cost, the fraction"),
        ({"drafting.draft_shape": "bush"}, "drafting.draft_shape: Input should be 'path' or 'tree'"),
        ({"limits.streams": 0}, "limits.streams: Input should be greater than or equal to 1"),
        ({"limits.streams": None}, "limits.streams: Input should be a valid integer"),
        ({"snapshots.interval_s": "nan"}, "snapshots.interval_s: Input should be greater than 0"),
        ({"namespaces.create": "perhaps"}, "namespaces.create: Input should be a valid boolean"),
        ({"namespaces.capacities": 5}, "namespaces.capacities: Input should be a valid dictionary"),
        ({"namespaces.capacities.a": "x"}, "namespaces.capacities.a: 'x' is not a number"),
        ({"namespaces.capacities.a": 5}, "namespaces.capacities.a: a corpus holds 4,096 to"),
        ({"access.key": "x"}, "access: key needs certificate"),
    ],
)
def test_errors_name_the_key_in_one_line(flags, message):
    with pytest.raises(UserError) as refused:
        loaded(flags=flags)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_errors_name_the_environment_or_the_file(tmp_path):
    with pytest.raises(UserError, match=r"variables SSD_DRAFTER_.*: there is no setting limits.stream; did you mean"):
        loaded(environment={"SSD_DRAFTER_LIMITS__STREAM": "1"})
    file = tmp_path / "settings.toml"
    with pytest.raises(UserError, match=f"cannot read the settings in {file}: No such file"):
        loaded(file)
    for content in ("limits = ", "\xff"):
        file.write_bytes(content.encode("latin1"))
        with pytest.raises(UserError, match=f"{file} is not TOML"):
            loaded(file)
    file.write_text("[limit]\nstreams = 1\n")
    with pytest.raises(UserError, match=f"{file}: there is no setting limit.streams; did you mean limits.streams"):
        loaded(file)


def test_assignments_need_a_key_and_an_equals_sign():
    for text in ("limits.streams", "=5", ""):
        with pytest.raises(UserError, match="is not of the form KEY=VALUE"):
            read_assignments([text])


def test_quantities_have_suffixes_and_are_integers():
    given = {"5": 5, "16M": 16_000_000, "1.5k": 1500, "4.35m": 4_350_000, "2G": 2_000_000_000, "1_000": 1000}
    given["16,000,000"] = 16_000_000
    assert {text: parse_quantity(text) for text in given} == given
    wrong = ["k", "5kk", "many", "inf", "nan", "1e400", "1e999999999", "1.5", "0.0001k", "1,5M", "1,500M", "1,00"]
    for text in ("", "5 6", *wrong):
        with pytest.raises(ValueError, match="is not a number"):
            parse_quantity(text)


NAMES = st.text(st.characters(codec="ascii", exclude_categories=["C"]), min_size=1, max_size=20)


@examples(30)
@given(
    st.dictionaries(NAMES, st.integers(4096, 1 << 31), max_size=3),
    st.integers(1, 1 << 60),
    st.floats(0, exclude_min=True, allow_nan=False),
    st.one_of(st.none(), NAMES.map(Path)),
    st.one_of(st.none(), NAMES),
)
def test_printed_settings_are_read_back(tmp_path_factory, capacities, streams, interval_s, folder, url):
    tree = {
        "namespaces": {"capacities": capacities},
        "limits": {"streams": streams},
        "snapshots": {"folder": folder, "interval_s": interval_s},
        "log": {"url": url},
    }
    config = loaded(flags=tree)
    file = tmp_path_factory.getbasetemp() / "printed.toml"
    file.write_text(SETTINGS.to_toml(config))
    assert loaded(file) == config


def test_passwords_are_not_printed():
    for url, printed in (
        ("redis://user:secret@host:1/2", "redis://user:***@host:1/2"),
        ("rediss://:s:e@host", "rediss://:***@host"),
        ("redis://:p@s/s@host:1", "redis://:***@host:1"),
        ("redis://a@b:secret@host", "redis://a@b:***@host"),
        ("redis://host/0?password=s@e#c&db=1", "redis://host/0?password=***&db=1"),
        ("unix:///run/redis.sock?db=1&password=secret", "unix:///run/redis.sock?db=1&password=***"),
        ("redis://host:6379/0", "redis://host:6379/0"),
    ):
        assert f'url = "{printed}"' in SETTINGS.to_toml(loaded(flags={"log": {"url": url}}))


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_assignment_is_accepted_or_refused(key, value):
    try:
        config = loaded(flags=read_assignments([f"{key}={value}"]))
    except UserError:
        return
    assert isinstance(config, ServiceConfig)


def test_every_setting_is_printed_below_its_meaning():
    lines = SETTINGS.to_toml(ServiceConfig()).splitlines()
    settings = [(above, line) for above, line in pairwise(lines) if re.match(r"#?\w+ = ", line)]
    assert [line.lstrip("#").partition(" ")[0] for _, line in settings] == [key.rpartition(".")[2] for key in LEAVES]
    tables = [(above, line) for above, line in pairwise(lines) if line.startswith("[")]
    assert "[namespaces.capacities]" in {line for _, line in tables}
    assert all(above.startswith("# ") and above.endswith(".") for above, _ in settings + tables)
    assert '#folder = ""' in lines  # A setting without a value is a comment that can be completed.
