"""Settings from the environment: every field, and one sentence for what cannot be used."""

from __future__ import annotations

import pytest

from regroup_operator.model.records import Settings
from regroup_operator.settings import OperatorSettings, SettingsError, load, variable


def test_without_environment_the_policys_defaults_hold() -> None:
    settings = load({"PATH": "/bin", "REGROUP_PORT": "tcp://10.0.0.1:8443"})
    assert settings.policy() == Settings()
    assert settings.url == "https://regroup.regroup-system.svc:8443"


def test_environment_sets_fields_by_their_names() -> None:
    settings = load(
        {
            "REGROUP_SETTINGS_JOIN_QUIET_SECONDS": "0.5",
            "REGROUP_SETTINGS_WATCH_NAMESPACES": "a, b",
            "REGROUP_SETTINGS_AGENT_IMAGE_PULL_SECRETS": "",
            "REGROUP_SETTINGS_NAMESPACE": "ops",
        }
    )
    assert settings.policy().join_quiet_s == 0.5
    assert settings.watch_namespaces == ["a", "b"]
    assert settings.agent_image_pull_secrets == []
    assert settings.url == "https://regroup.ops.svc:8443"


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("REGROUP_SETTINGS_JOIN_QUITE_SECONDS", "1", "REGROUP_SETTINGS_JOIN_QUITE_SECONDS is not a setting."),
        ("REGROUP_SETTINGS_JOIN_QUIET_SECONDS", "soon", "REGROUP_SETTINGS_JOIN_QUIET_SECONDS (soon) is refused:"),
        ("REGROUP_SETTINGS_OPS_PORT", "70000", "REGROUP_SETTINGS_OPS_PORT (70000) is refused:"),
        ("REGROUP_SETTINGS_LEASE_DURATION_SECONDS", "11", "is more than leaseDurationSeconds (11)"),
    ],
)
def test_unusable_setting_is_one_sentence(name: str, text: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load({name: text})
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_field_is_documented_and_has_a_variable_of_its_own() -> None:
    fields = OperatorSettings.model_fields
    assert [name for name, field in fields.items() if not field.description] == []
    assert len({variable(name) for name in fields}) == len(fields)
