"""The chart's values are those that the operator reads: a name in one place is a name in the other."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from regroup_operator.model.records import Settings
from regroup_operator.settings import load, variable

CHART = Path(__file__).resolve().parents[2] / "helm" / "regroup"


def settings_in_chart() -> set[str]:
    schema = json.loads((CHART / "values.schema.json").read_text())
    return set(schema["properties"]["settings"]["properties"])


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


def test_operator_reads_every_variable_that_the_deployment_sets() -> None:
    template = (CHART / "templates" / "deployment.yaml").read_text()
    names = re.findall(r"- name: (REGROUP_SETTINGS_[A-Z_]+)\n", template)
    assert len(names) >= 5
    sample = {"REGROUP_SETTINGS_LOG_LEVEL": "info", "REGROUP_SETTINGS_AGENT_IMAGE_PULL_POLICY": "Always"}
    load({name: sample.get(name, "x") for name in names})
