"""Settings of plug-ins from environment variables."""

from pathlib import Path

import pytest

from drafter_service.auth.connector import ClientAccess
from drafter_service.observability.facts import ModelIdentity
from drafter_service.plugins.environment import settings_from_environment
from drafter_service.plugins.namespaces import DEFAULT_ADDRESS, DrafterSettings
from ssd.errors import UserError

MODEL = ModelIdentity(name="model")


def test_without_variables_the_defaults_apply():
    assert settings_from_environment(MODEL, {"SSD_NAMESPACE": "", "HOME": "/"}) == DrafterSettings(
        ssd=DEFAULT_ADDRESS, model=MODEL, deadline_s=0.01, access=ClientAccess()
    )


def test_each_variable_is_read():
    settings = settings_from_environment(
        MODEL,
        {
            "SSD_ADDRESS": "drafter:50051",
            "SSD_NAMESPACE": "code",
            "SSD_DEADLINE_MS": "2.5",
            "SSD_CAPACITY": "4M",
            "SSD_CA": "/ca",
            "SSD_CERTIFICATE": "/cert",
            "SSD_KEY": "/key",
            "SSD_TOKEN_FILE": "/token",
            "SSD_SERVER_NAME": "drafter",
        },
    )
    access = ClientAccess(Path("/ca"), Path("/cert"), Path("/key"), Path("/token"), "drafter")
    assert settings == DrafterSettings("drafter:50051", "code", MODEL, 0.0025, access, 4_000_000)


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf"])
@pytest.mark.parametrize("name", ["SSD_DEADLINE_MS", "SSD_CAPACITY"])
def test_invalid_numbers_are_refused(name, value):
    with pytest.raises(UserError, match=f"{name} must be a number above 0, not '{value}'"):
        settings_from_environment(MODEL, {name: value})


def test_contradictory_files_are_refused():
    with pytest.raises(UserError, match=r"SSD_KEY.*certificate needs key"):
        settings_from_environment(MODEL, {"SSD_CERTIFICATE": "/cert"})
