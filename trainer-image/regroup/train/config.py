"""The configuration of a run: what a YAML file may say, checked whole before anything is built.

Unknown fields are refused, nothing is converted, and a configuration never changes. Each wrong field gives one sentence with
its name, its value, the rule and what to do. Pure but for reading the file. docs/train.md has every field; a test holds it
complete.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator


class ConfigError(ValueError):
    """A configuration that cannot be used; `str()` has a line, one sentence, for each mistake."""


def _named(value: Any) -> Any:
    """Take `optimizer: sgd` for `optimizer: {name: sgd}`."""
    return {"name": value} if isinstance(value, str) else value


class Section(BaseModel):
    """A part of the configuration."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Digits(Section):
    """A perceptron on scikit-learn's handwritten digits, 1,797 images of 8 x 8."""

    name: Literal["digits"]
    width: int = Field(default=128, ge=1)
    """Width of the two hidden layers."""


class Cnn(Section):
    """A convolutional network on the same digits, enlarged to the 28 x 28 of MNIST."""

    name: Literal["cnn"]
    width: int = Field(default=16, ge=8, multiple_of=8)
    """Channels of the first layer; the others have twice and four times as many."""


HEADS = {"tiny": 4, "gpt2": 12}
"""Attention heads, by `task.size`: processes of `mesh.tensor` share them out."""


class LanguageModel(Section):
    """GPT-2's architecture on tokens, predicting the next one."""

    name: Literal["language_model"]
    size: Literal["tiny", "gpt2"] = "tiny"
    """tiny: 4 layers of width 128, 0.8 million parameters. gpt2: GPT-2 124M."""
    length: int | None = Field(default=None, ge=1, le=1024)
    """Tokens in a sample. Absent: 128 for tiny, 1024 for gpt2."""
    text: str | None = None
    """Path of a text file; its bytes become the tokens. Absent, without `tokens`: the source text of Python's standard library."""
    tokens: str | None = None
    """Path of a token file. It is made from `text` if it does not exist. Absent: tokens are kept in memory."""


class Sgd(Section):
    """torch.optim.SGD."""

    name: Literal["sgd"]
    learning_rate: float = Field(default=0.05, gt=0)
    """Rate after warm-up."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Share of the last update that the next one repeats."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Applied to weights with two or more dimensions, not to biases and norms."""


class AdamW(Section):
    """torch.optim.AdamW, fused."""

    name: Literal["adamw"]
    learning_rate: float = Field(default=3e-4, gt=0)
    """Rate after warm-up."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of their squares."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Applied to weights with two or more dimensions, not to biases and norms."""


class Constant(Section):
    """The rate stays after warm-up."""

    name: Literal["constant"]
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the rate rises linearly to `learning_rate`."""


class Decay(Section):
    """The rate falls from warm-up to the last step."""

    name: Literal["cosine", "linear"]
    """cosine: half a cosine wave. linear: a straight line."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the rate rises linearly to `learning_rate`."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """The rate at the last step, as a fraction of `learning_rate`."""


class DataParallel(Section):
    """Each step applies the gradient of its whole batch, summed over the processes."""

    name: Literal["data_parallel"]
    uneven: bool = False
    """Processes that take longer for a microbatch get fewer of them."""
    algorithm: Literal["library", "ring"] = "library"
    """What sums gradients. library: the all-reduce of gloo or NCCL. ring: the library's own, to read and to compare with."""


class Mesh(Section):
    """How many processes hold one copy of the model together, by dimension of regroup.mesh(), outermost first. 1: not split."""

    shard: int = Field(default=1, ge=1)
    """Processes that compute different samples and split every parameter (FSDP2)."""
    tensor: int = Field(default=1, ge=1)
    """Processes that compute the same samples, each its part of a layer."""

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions along which the model is split: what regroup.mesh() is called with, if there is one."""
        return {name: size for name, size in self.model_dump().items() if size > 1}


class LocalSgd(Section):
    """Each process steps the optimizer by itself, and each step averages the parameters."""

    name: Literal["local_sgd"]
    inner_steps: int = Field(default=10, ge=1)
    """Optimizer steps of each process in one step."""


class DiLoCo(Section):
    """As local_sgd, with a step of SGD with Nesterov momentum in place of the average."""

    name: Literal["diloco"]
    inner_steps: int = Field(default=10, ge=1)
    """Optimizer steps of each process in one step."""
    outer_learning_rate: float = Field(default=0.7, gt=0)
    """Learning rate of the step over all processes."""
    outer_momentum: float = Field(default=0.9, gt=0, lt=1)
    """Momentum of the step over all processes."""


class ParameterServer(Section):
    """Processes push gradients to one of them and pull parameters from it, each at its own pace."""

    name: Literal["parameter_server"]
    staleness: int | None = Field(default=0, ge=0)
    """The oldest gradient that is applied, in steps. 0: synchronous. null: no bound."""
    shares_per_version: int | None = Field(default=None, ge=1)
    """Microbatches whose gradients make a step. Absent: those of a whole batch with staleness 0, else one."""
    computes: bool = True
    """Server and standby compute gradients as well. false: they only serve."""

    def step_samples(self, microbatch: int, global_batch: int) -> int:
        """Return the number of samples in a step."""
        if self.shares_per_version is not None:
            return microbatch * self.shares_per_version
        return global_batch if self.staleness == 0 else microbatch


class Config(Section):
    """A whole run."""

    task: Annotated[Digits | Cnn | LanguageModel, Field(discriminator="name"), BeforeValidator(_named)]
    """What is trained on what: digits, cnn or language_model."""
    steps: int = Field(ge=1)
    """Steps of the whole run, all epochs together."""
    global_batch: int = Field(ge=1)
    """Samples in a step over all processes. It stays the same at any number of processes."""
    microbatch: int = Field(ge=1)
    """Samples in a forward pass. It divides `global_batch`, at least as often as there may be processes."""
    seed: int = Field(default=0, ge=0, lt=1 << 64)
    """Determines the first parameters and the order of the samples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one."""
    reduction: Literal["fast", "exact"] = "fast"
    """exact: the same parameters, bit by bit, at any number of processes; slower."""
    hook: Literal["fp16", "bf16"] | None = None
    """Format that gradients are rounded to for the sum over processes. Absent: not rounded."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of forward and backward, by torch.autocast; parameters stay float32. float16: with a GradScaler."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """full: backward computes each block again, which needs less memory. selective: all but matrix products and attention."""
    compile: bool = False
    """Compile each block with torch.compile. A worker compiles before it joins a running job."""
    optimizer: Annotated[Sgd | AdamW, Field(discriminator="name"), BeforeValidator(_named)] = AdamW(name="adamw")
    """sgd or adamw."""
    schedule: Annotated[Constant | Decay, Field(discriminator="name"), BeforeValidator(_named)] = Constant(
        name="constant"
    )
    """constant, cosine or linear: how the learning rate changes."""
    strategy: Annotated[
        DataParallel | LocalSgd | DiLoCo | ParameterServer, Field(discriminator="name"), BeforeValidator(_named)
    ] = DataParallel(name="data_parallel")
    """data_parallel, local_sgd, diloco or parameter_server: how the processes share the work of a step."""
    mesh: Mesh | None = None
    """Processes that hold one copy of the model together. Absent: each process holds all of it."""
    max_norm: float | None = Field(default=None, gt=0)
    """The gradient's norm is clipped to it. Absent: no clipping."""
    noise_scale: bool = False
    """Measure the gradient noise scale, and print it with the loss."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Evaluate on held-out data after so many steps, and after the last one. Absent: after the last one only."""
    print_every: int = Field(default=100, ge=1)
    """Steps between two lines of loss, gradient norm and learning rate."""
    tensorboard: str | None = None
    """Directory for TensorBoard's files. Absent: none are written."""
    histograms_every: int | None = Field(default=None, ge=1)
    """Steps between two histograms of each parameter and gradient, with tensorboard. Absent: none."""
    profile_at: int | None = Field(default=None, ge=1)
    """First of three steps that a profiler records, with tensorboard. Absent: none."""

    @model_validator(mode="after")
    def _fields_fit(self) -> "Config":
        if self.global_batch % self.microbatch:
            fit = max(1, round(self.global_batch / self.microbatch)) * self.microbatch
            raise ValueError(
                f"global_batch ({self.global_batch}) is not a multiple of microbatch ({self.microbatch}). "
                f"Write global_batch: {fit}, or a microbatch that divides it."
            )
        strategy = self.strategy
        if isinstance(strategy, DataParallel):
            if strategy.uneven and self.reduction == "exact":
                raise ValueError(
                    "strategy.uneven cannot be used with reduction exact, whose bits must not depend on times. Leave one of them "
                    "out."
                )
        else:
            if isinstance(strategy, ParameterServer):
                if (strategy.shares_per_version or 1) * self.microbatch > self.global_batch:
                    raise ValueError(
                        f"strategy.shares_per_version ({strategy.shares_per_version}) is more than the microbatches of a batch "
                        f"(global_batch / microbatch: {self.global_batch // self.microbatch}). Lower it, or raise global_batch."
                    )
            elif strategy.inner_steps * self.microbatch > self.global_batch:
                raise ValueError(
                    f"strategy.inner_steps ({strategy.inner_steps}) is more than the microbatches of a step (global_batch / "
                    f"microbatch: {self.global_batch // self.microbatch}). Lower it, or raise global_batch: it counts the samples "
                    "of all inner steps."
                )
            if self.hook is not None:
                raise ValueError(
                    f"hook ({self.hook!r}) cannot be used with strategy {strategy.name}. Leave one of them out."
                )
            for field, value, choice in (
                ("reduction", self.reduction, "exact"),
                ("precision", self.precision, "float16"),
            ):
                if value == choice:
                    raise ValueError(
                        f"{field} ({choice}) cannot be used with strategy {strategy.name}. Choose another {field}."
                    )
        if self.noise_scale:
            for name, is_asked in (
                (f"strategy {strategy.name}", not isinstance(strategy, DataParallel)),
                ("reduction exact", self.reduction == "exact"),
                ("precision float16", self.precision == "float16"),
            ):
                if is_asked:
                    raise ValueError(f"noise_scale cannot be measured with {name}. Leave one of them out.")
        for field in ("histograms_every", "profile_at"):
            if getattr(self, field) is not None and self.tensorboard is None:
                raise ValueError(
                    f"{field} ({getattr(self, field)}) needs tensorboard. Add tensorboard: DIRECTORY, or remove {field}."
                )
        if isinstance(strategy, DataParallel) and strategy.algorithm == "ring":
            for field, is_asked in (("hook", self.hook is not None), ("reduction", self.reduction == "exact")):
                if is_asked:
                    raise ValueError(
                        f"strategy.algorithm ('ring') cannot be used with {field} ({getattr(self, field)}). Leave one of them out."
                    )
        refused = _refused_with_mesh(self)
        if refused is not None:
            raise ValueError(refused)
        if self.hook is not None and self.reduction == "exact":
            raise ValueError(f"hook ({self.hook!r}) rounds gradients, and reduction is exact. Leave one of them out.")
        if self.schedule.warmup_steps >= self.steps:
            raise ValueError(
                f"schedule.warmup_steps ({self.schedule.warmup_steps}) must be less than steps ({self.steps}). Lower it, "
                "or raise steps."
            )
        return self


def _refused_with_mesh(config: Config) -> str | None:
    """Return a sentence about what does not go with the configuration's mesh, None if all does. A further dimension has its own
    rules here."""
    sizes = config.mesh.sizes if config.mesh is not None else {}
    if not sizes:
        return None
    mesh = "mesh ({})".format(", ".join(f"{name}: {size}" for name, size in sizes.items()))
    for field, value, is_refused in (
        ("strategy", config.strategy.name, not isinstance(config.strategy, DataParallel)),
        ("strategy.algorithm", "ring", getattr(config.strategy, "algorithm", "") == "ring"),
        ("strategy.uneven", "true", getattr(config.strategy, "uneven", False)),
        ("noise_scale", "true", config.noise_scale),
        ("hook", config.hook, config.hook is not None),
        ("reduction", "exact", config.reduction == "exact"),
        ("precision", "float16", config.precision == "float16"),
        ("histograms_every", config.histograms_every, config.histograms_every is not None),
        ("compile", "true", config.compile and "tensor" in sizes),
    ):
        if is_refused:
            return f"{field} ({value}) cannot be used with {mesh}. Leave one of them out."
    num_microbatches, shard = config.global_batch // config.microbatch, sizes.get("shard", 1)
    if num_microbatches % shard:
        return (
            f"mesh.shard ({shard}) does not divide the microbatches of a step (global_batch / microbatch: {num_microbatches}). "
            "Change one of them."
        )
    return _refused_with_tensor(config.task, sizes.get("tensor", 1))


def _refused_with_tensor(task: Digits | Cnn | LanguageModel, tensor: int) -> str | None:
    if tensor == 1:
        return None
    if isinstance(task, Cnn):
        return f"mesh.tensor ({tensor}) cannot be used with task cnn, whose layers are not split. Use mesh.shard."
    whole, many = ("task.width", task.width) if isinstance(task, Digits) else ("the attention heads", HEADS[task.size])
    if many % tensor:
        return f"mesh.tensor ({tensor}) does not divide {whole} ({many}) of task {task.name}. Choose a size that divides it."
    return None


def load(path: str, changes: Sequence[str] = ()) -> Config:
    """Return the configuration of a file with `changes`, each FIELD=VALUE. Raises ConfigError."""
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
    """Return the configuration that a document is. Raises ConfigError with a sentence for each wrong field."""
    try:
        return Config.model_validate(dict(document))
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(one) for one in error.errors())) from None


def as_yaml(config: Config) -> str:
    """Return the whole configuration, defaults included, as a file that `load` reads."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False)


class _Loader(yaml.SafeLoader):
    """YAML in which 3e-4 is a number, as everybody expects, and no field comes twice."""

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


def _change(document: dict[str, Any], change: str) -> None:
    """Set one field, as --set says. A section in short form (`optimizer: sgd`) is written out first."""
    field, equals, text = change.partition("=")
    path = field.split(".")
    if not equals or not all(path):
        raise ConfigError(
            f"--set ({change}) is not FIELD=VALUE. Write it as steps=100 or optimizer.learning_rate=3e-4."
        )
    inner = document
    for i, key in enumerate(path[:-1]):
        section = _named(inner.get(key, _default_name(key) if not i else {}))
        if not isinstance(section, dict):
            whole = ".".join(path[: i + 1])
            raise ConfigError(
                f"--set ({change}) needs {whole} to have fields, and it is {section!r}. Name another field."
            )
        inner[key] = inner = dict(section)
    inner[path[-1]] = _parsed(text, f"--set ({change})")


def _default_name(field: str) -> Any:
    """Return what a section is when the file does not name it; {} for what is no such section."""
    info = Config.model_fields.get(field)
    return getattr(info.default, "name", {}) if info is not None else {}


_NUMBERS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "finite_number": "a finite number",
}
_NAMELESS: dict[str, type[Section]] = {"mesh": Mesh}
"""Sections without choices, which have no name. Pydantic names the choice of the others in a location."""
_KINDS = {
    **_NUMBERS,
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a name, or a mapping of fields",
    "model_attributes_type": "a name, or a mapping of fields",
}
_BOUNDS = {
    "greater_than": "above",
    "greater_than_equal": "at least",
    "less_than": "below",
    "less_than_equal": "at most",
}
_BOUND_KEYS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}


def _sentence(error: Any) -> str:
    """Return what pydantic found as a sentence for a user."""
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
        section = _fields_of(error["loc"])
        near = difflib.get_close_matches(path[-1], section, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Choose from {', '.join(section)}, or remove it."
        return f"{said} is no field of the configuration{_of(error['loc'])}. {hint}"
    if kind == "missing":
        return f"{field} is missing. Add it: {_description(error['loc'])}"
    if kind == "literal_error":
        return f"{said} must be {context['expected'].replace(chr(39), '')}. Choose one of them."
    if kind == "union_tag_invalid":
        name = value.get("name") if isinstance(value, dict) else value
        return f"{field}.name ({name!r}) must be one of {context['expected_tags'].replace(chr(39), '')}. Choose one of them."
    if kind == "union_tag_not_found":
        return f"{field} has no name. Add one of {', '.join(_SECTIONS[field])}, such as {field}: {_SECTIONS[field][0]}."
    if kind == "multiple_of":
        return f"{said} must be a multiple of {context['multiple_of']}. Correct it."
    if kind in _BOUNDS:
        return f"{said} must be {_BOUNDS[kind]} {context[_BOUND_KEYS[kind]]}. Correct it."
    if kind in ("model_type", "model_attributes_type") and nameless:
        first = next(iter(_NAMELESS[field].model_fields))
        return f"{said} must be a mapping of fields, such as {field}: {{{first}: 2}}. Correct it."
    if kind in _KINDS:
        return f"{said} must be {_KINDS[kind]}. Correct it."
    return f"{said} cannot be used: {error['msg']}. Correct it."


def sections() -> Iterator[tuple[str, str, type[Section]]]:
    """Yield the field, the name and the model of each section that a configuration may have."""
    for field, models in (
        ("task", (Digits, Cnn, LanguageModel)),
        ("optimizer", (Sgd, AdamW)),
        ("schedule", (Constant, Decay)),
        ("strategy", (DataParallel, LocalSgd, DiLoCo, ParameterServer)),
    ):
        for model in models:
            for name in model.model_fields["name"].annotation.__args__:  # type: ignore[union-attr]
                yield field, name, model


_SECTIONS: dict[str, list[str]] = {}
for _field, _name, _ in sections():
    _SECTIONS.setdefault(_field, []).append(_name)


def _model_of(location: Sequence[Any]) -> type[Section]:
    """Return the model that has the field at a location: (field,), or (section, its name, field)."""
    if len(location) == 2 and location[0] in _NAMELESS:
        return _NAMELESS[location[0]]
    if len(location) < 3:
        return Config
    return next(model for field, name, model in sections() if (field, name) == tuple(location[:2]))


def _fields_of(location: Sequence[Any]) -> list[str]:
    return list(_model_of(location).model_fields)


def _of(location: Sequence[Any]) -> str:
    return (
        f" of {location[0]} {location[1]}" if len(location) > 2 else f" of {location[0]}" if len(location) > 1 else ""
    )


def _description(location: Sequence[Any]) -> str:
    return _model_of(location).model_fields[str(location[-1])].description or ""
