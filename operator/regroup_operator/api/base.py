"""Base of the models of spec and status: spelling, strictness, and how a CEL rule is attached.

Python spells snake_case, the resource spells camelCase; docstrings under fields become the descriptions that
`kubectl explain` and the reference page show.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from copy import copy
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Model = TypeVar("Model", bound=BaseModel)

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

    @classmethod
    def without_rules(cls, raw: Mapping[str, Any]) -> Self:
        """Return what an older version has accepted: no rule is applied, and fields that are gone are left out."""
        return _without_rules(cls, raw)


def _without_rules(model: type[Model], raw: Mapping[str, Any]) -> Model:
    known = {(field.alias or name): (name, field.annotation) for name, field in model.model_fields.items()}
    open_to_all = model.model_config.get("extra") == "allow"
    values = {
        known[key][0] if key in known else key: _unruled(known[key][1], value) if key in known else value
        for key, value in raw.items()
        if key in known or open_to_all
    }
    return model.model_construct(**values)


def _unruled(annotation: Any, value: Any) -> Any:
    """Return the value of a field: where it is a model, or a list of models, as such."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _without_rules(annotation, value) if isinstance(value, Mapping) else value
    if get_origin(annotation) in (Union, types.UnionType):
        return next((found for kind in get_args(annotation) if (found := _unruled(kind, value)) is not value), value)
    if get_origin(annotation) is list and isinstance(value, list):
        return [_unruled(get_args(annotation)[0], item) for item in value]
    return value


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

    def with_fields(self, **changed: Any) -> Self:
        """Return a copy in which these fields have other values. The values are not validated: they have the fields' types."""
        assert changed.keys() <= self.__dict__.keys(), changed
        made = copy(self)
        made.__dict__.update(changed)  # a plan makes many copies, and `model_copy` takes twice as long
        return made


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
