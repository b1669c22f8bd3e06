"""What the models of spec and status have in common: spelling, strictness, and how a CEL rule is attached.

Python spells snake_case, the resource spells camelCase; docstrings under fields become the descriptions that
`kubectl explain` and the reference page show.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
"""RFC 3339 text, as in every Kubernetes object."""


class SpecModel(BaseModel):
    """A part of what the user writes: unknown fields and wrong types are refused, nothing is converted."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
    )


class OpenModel(BaseModel):
    """A part of the pod template: declares what our rules read, keeps everything else as it is."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, use_attribute_docstrings=True)


class WrittenModel(BaseModel):
    """A part of what we write: what a newer version wrote is kept, so that a roll-back of the operator loses nothing."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="allow",
        frozen=True,
        use_attribute_docstrings=True,
    )

    def to_dict(self) -> dict[str, Any]:
        """Return the camelCase dict for the API: fields without a value are left out, never null."""
        return self.model_dump(by_alias=True, exclude_none=True)


def cel(rule: str, message: str, expression: str | None = None) -> dict[str, str]:
    """Return one x-kubernetes-validations entry.

    `expression` is CEL that builds the sentence with the values found; `message` is what the API server says when it
    cannot be evaluated.
    """
    entry = {"rule": rule, "message": message}
    if expression is not None:
        entry["messageExpression"] = expression
    return entry


def with_rules(*rules: dict[str, str]) -> ConfigDict:
    """Return a model_config that attaches CEL rules to a model's object schema."""
    schema: dict[str, Any] = {"x-kubernetes-validations": list(rules)}
    return ConfigDict(json_schema_extra=schema)
