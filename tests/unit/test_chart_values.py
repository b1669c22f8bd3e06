"""The chart's values are those that the operator reads: a name in one place is a name in the other."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from regroup_operator.model.records import Settings
from regroup_operator.settings import OperatorSettings, SettingsError, load, variable

CHART = Path(__file__).resolve().parents[2] / "helm" / "regroup"


def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return found


def settings_in_chart() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = schema()["properties"]["settings"]["properties"]
    return found


def environment_name(value: str) -> str:
    """What `snakecase | upper` in the deployment's template makes of a value's name."""
    return "REGROUP_SETTINGS_" + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", value).upper()


def test_operator_reads_every_setting_of_the_chart() -> None:
    values = {environment_name(name): "9" for name in settings_in_chart()}
    values["REGROUP_SETTINGS_LEASE_DURATION_SECONDS"] = "20"
    assert load(values).join_quiet_s == 9


def test_chart_offers_every_time_of_the_membership_policy() -> None:
    offered = {environment_name(name) for name in settings_in_chart()}
    assert {variable(field.name) for field in dataclasses.fields(Settings)} <= offered


FIXED = {
    "service_name", "operator_url", "membership_host", "membership_port", "ops_host", "ops_port", "lease_name", "ca_secret_name",
}  # fmt: skip
"""What the chart's own Service, ports and names decide."""


def test_every_setting_can_be_set_through_the_chart_or_is_the_charts_own() -> None:
    template = (CHART / "templates" / "deployment.yaml").read_text()
    offered = {environment_name(name) for name in settings_in_chart()}
    offered |= set(re.findall(r"- name: (REGROUP_SETTINGS_[A-Z_]+)\n", template))
    missing = {name for name in OperatorSettings.model_fields if variable(name) not in offered}
    assert missing == FIXED


def test_operator_reads_every_variable_that_the_deployment_sets() -> None:
    template = (CHART / "templates" / "deployment.yaml").read_text()
    names = re.findall(r"- name: (REGROUP_SETTINGS_[A-Z_]+)\n", template)
    assert len(names) >= 5
    sample = {
        "REGROUP_SETTINGS_LOG_LEVEL": "info",
        "REGROUP_SETTINGS_AGENT_IMAGE_PULL_POLICY": "Always",
        "REGROUP_SETTINGS_PER_JOB_METRICS": "true",
    }
    load({name: sample.get(name, "x") for name in names})


@pytest.mark.parametrize("name", [name for name, node in settings_in_chart().items() if node["type"] != "string"])
def test_chart_takes_no_number_that_the_operator_refuses(name: str) -> None:
    """What helm takes and the operator does not would be a pod that starts again and again."""
    bounds = settings_in_chart()[name]
    smallest = bounds["minimum"] if "minimum" in bounds else bounds["exclusiveMinimum"] + 0.001
    others = {"REGROUP_SETTINGS_LEASE_DURATION_SECONDS": "100"} if "lease" in name else {}
    if name == "leaseDurationSeconds":  # the two others must fit into it
        others = {variable("lease_renew_deadline_s"): "1", variable("lease_retry_s"): "1"}
    load(others | {environment_name(name): str(smallest)})
    too_small = smallest - 1 if bounds["type"] == "integer" else smallest - 0.001
    with pytest.raises(SettingsError):
        load(others | {environment_name(name): str(too_small)})


def test_value_of_each_field_has_the_type_of_the_chart() -> None:
    fields = {variable(name): field.annotation for name, field in OperatorSettings.model_fields.items()}
    types = {"integer": int, "number": float, "string": str}
    assert {name: fields[environment_name(name)] for name in settings_in_chart()} == {
        name: types[bounds["type"]] for name, bounds in settings_in_chart().items()
    }


def test_schema_knows_every_value_and_nothing_else() -> None:
    def names(values: dict[str, Any], node: dict[str, Any], at: str) -> tuple[set[str], set[str]]:
        given, known = {at + name for name in values}, {at + name for name in node["properties"]}
        for name, value in values.items():
            if isinstance(value, dict) and "properties" in node["properties"][name] and name != "settings":
                inner = names(value, node["properties"][name], f"{at}{name}.")
                given, known = given | inner[0], known | inner[1]
        return given, known

    given, known = names(yaml.safe_load((CHART / "values.yaml").read_text()), schema(), "")
    assert given == known - {"global"}  # helm itself puts that in


def test_page_on_settings_has_each_with_its_default_and_values_yaml_names_the_page() -> None:
    page = (CHART.parents[1] / "docs/reference/settings.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    assert set(rows) == set(settings_in_chart())
    fields = {variable(name): field.default for name, field in OperatorSettings.model_fields.items()}
    defaults = {name: fields[environment_name(name)] for name in rows}
    assert rows == {name: "empty" if value == "" else f"{value:g}" for name, value in defaults.items()}
    assert "docs/reference/settings.md" in (CHART / "values.yaml").read_text()


def test_taints_that_announce_the_end_of_a_node_are_the_operators_own() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["drainTaints"] == OperatorSettings().drain_taints
    assert load({variable("drain_taints"): ""}).drain_taints == [], "an empty list in the chart is none"


def test_membership_service_publishes_unready_addresses() -> None:
    """After an outage of the API server a pod may be called unready for a minute while its process runs and holds the lease."""
    documents = yaml.safe_load_all((CHART.parents[1] / "manifests" / "install.yaml").read_text())
    (service,) = [d for d in documents if d and d["kind"] == "Service"]
    assert service["spec"]["selector"]["regroup.dev/leader"] == "true"
    assert service["spec"]["publishNotReadyAddresses"] is True
