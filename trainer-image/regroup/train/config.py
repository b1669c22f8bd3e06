"""The configuration of a run. It is read from a YAML file and checked as a whole before anything is built.

Unknown fields are refused, and no value is converted. Each wrong field gives one sentence with its name, its value, the rule and
the remedy. `sections` has the fields, `refusals` the combinations that do not work. Pure but for reading the file.
docs/how-to/train.md lists every field, and a test checks that it does.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, model_validator

from .refusals import refused
from .sections import (
    AdamW,
    Cnn,
    Constant,
    DataParallel,
    Decay,
    Digits,
    DiLoCo,
    Fields,
    LanguageModel,
    LocalSgd,
    Mesh,
    ParameterServer,
    PowerSgd,
    RateScaling,
    Rounded,
    Section,
    Sgd,
    named,
)


class ConfigError(ValueError):
    """A configuration cannot be used. `str()` has a line with one sentence for each mistake."""


class Config(Fields):
    """The configuration of a run whose fields work together."""

    @model_validator(mode="after")
    def _fields_fit(self) -> "Config":
        sentence = refused(self)
        if sentence is not None:
            raise ValueError(sentence)
        return self


def load(path: str, changes: Sequence[str] = ()) -> Config:
    """Return the configuration in a file, after `changes` of the form FIELD=VALUE. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"CONFIG ({path}) cannot be read ({why}). Give the path of a YAML file.") from None
    document = _parsed(text, f"CONFIG ({path})")
    if not isinstance(document, dict):
        raise ConfigError(
            f"CONFIG ({path}) is no mapping of fields to values. Write a line `field: value` for each field."
        )
    for change in changes:
        _change(document, change)
    return parse(document)


def parse(document: Mapping[str, Any]) -> Config:
    """Return the configuration in a parsed document. Raises ConfigError with a sentence for each wrong field."""
    try:
        return Config.model_validate(dict(document))
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(one) for one in error.errors())) from None


def as_yaml(config: Config) -> str:
    """Return the whole configuration with its defaults as YAML, which `load` reads."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 3e-4 as a number and refuses a field that comes twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"field {key} comes twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parsed(text: str, what: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise ConfigError(f"{what} is no YAML{where}: {problem}. Correct it.") from None
    except Exception as error:  # Python refuses some values: 2026-99-99 is no date, and 5,000 digits are no number
        raise ConfigError(f"{what} has a value that cannot be read ({error}). Correct it.") from None


def _change(document: dict[str, Any], change: str) -> None:
    """Set one field as --set asks. A section in short form (`optimizer: sgd`) is written out first."""
    field, equals, text = change.partition("=")
    path = field.split(".")
    if not equals or not all(path):
        raise ConfigError(
            f"--set ({change}) is not FIELD=VALUE. Write it as steps=100 or optimizer.learning_rate=3e-4."
        )
    inner = document
    for i, key in enumerate(path[:-1]):
        section = named(inner.get(key, _default_name(key) if not i else {}))
        if not isinstance(section, dict):
            whole = ".".join(path[: i + 1])
            raise ConfigError(
                f"--set ({change}) needs {whole} to have fields, and it is {section!r}. Name another field."
            )
        inner[key] = inner = dict(section)
    inner[path[-1]] = _parsed(text, f"--set ({change})")


def _default_name(field: str) -> Any:
    """Return the name of a section that the file leaves out, or {} for a field without a default name."""
    info = Config.model_fields.get(field)
    return getattr(info.default, "name", {}) if info is not None else {}


_NAMELESS: dict[str, type[Section]] = {"mesh": Mesh, "rate_scaling": RateScaling}
"""Sections without a choice, which have no name. A location of pydantic contains the name of the choice of the others."""
_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a name, or a mapping of fields",
    "model_attributes_type": "a name, or a mapping of fields",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}
"""Words for pydantic's bounds, and their names in its context."""


def _sentence(error: Any) -> str:
    """Return an error of pydantic as a sentence for a user."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    nameless = error["loc"][0] in _NAMELESS if error["loc"] else True
    path = [
        str(part) for part in (error["loc"] if nameless else (*error["loc"][:1], *error["loc"][2:]))
    ]  # without the choice
    field = ".".join(path)
    said = f"{field} ({value!r})" if not isinstance(value, (dict, Section)) else field
    if kind == "value_error":
        return str(context["error"])
    if kind == "extra_forbidden":
        section = list(_model_of(error["loc"]).model_fields)
        near = difflib.get_close_matches(path[-1], section, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Choose from {', '.join(section)}, or remove it."
        return f"{said} is no field of the configuration{_of(error['loc'])}. {hint}"
    if kind == "missing":
        return f"{field} is missing. Add it: {_model_of(error['loc']).model_fields[path[-1]].description}"
    if kind == "literal_error":
        return f"{said} must be {context['expected'].replace(chr(39), '')}. Choose one of them."
    if kind == "union_tag_invalid":
        name = value.get("name") if isinstance(value, dict) else value
        return f"{field}.name ({name!r}) must be one of {context['expected_tags'].replace(chr(39), '')}. Choose one of them."
    if kind == "union_tag_not_found":
        names = [name for one, name, _ in sections() if one == field]
        return f"{field} has no name. Add one of {', '.join(names)}, such as {field}: {names[0]}."
    if kind == "multiple_of":
        return f"{said} must be a multiple of {context['multiple_of']}. Correct it."
    if kind == "string_pattern_mismatch":
        return f"{said} must not have a NUL character: it is a path. Correct it."
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"{said} must be {words} {context[name]}. Correct it."
    if kind in ("model_type", "model_attributes_type") and nameless:
        first = next(iter(_NAMELESS[field].model_fields))
        return f"{said} must be a mapping of fields, such as {field}: {{{first}: 2}}. Correct it."
    if kind in _KINDS:
        return f"{said} must be {_KINDS[kind]}. Correct it."
    return f"{said} cannot be used: {error['msg']}. Correct it."


def sections() -> Iterator[tuple[str, str, type[Section]]]:
    """Yield (field, name, model) for each section that a configuration may have."""
    for field, models in (
        ("task", (Digits, Cnn, LanguageModel)),
        ("hook", (Rounded, PowerSgd)),
        ("optimizer", (Sgd, AdamW)),
        ("schedule", (Constant, Decay)),
        ("strategy", (DataParallel, LocalSgd, DiLoCo, ParameterServer)),
    ):
        for model in models:
            for name in model.model_fields["name"].annotation.__args__:  # type: ignore[union-attr]
                yield field, name, model


def _model_of(location: Sequence[Any]) -> type[Section]:
    """Return the model with the field at a location, which is (field,) or (section, name of the choice, field)."""
    if len(location) == 2 and location[0] in _NAMELESS:
        return _NAMELESS[location[0]]
    if len(location) < 3:
        return Config
    return next(model for field, name, model in sections() if (field, name) == tuple(location[:2]))


def _of(location: Sequence[Any]) -> str:
    return (
        f" of {location[0]} {location[1]}" if len(location) > 2 else f" of {location[0]}" if len(location) > 1 else ""
    )
