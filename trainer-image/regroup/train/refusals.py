"""Refuses fields of a configuration that do not work together. The first conflict gives a sentence with values and remedy.

Each function checks one matter and does not depend on the others; `CHECKS` is their order. Pure. `sections` has the bounds of each
field. The library refuses the same combinations, but here they are refused before any worker starts.
"""

import math
from collections.abc import Callable, Mapping
from typing import Final

from regroup.layout import CONTEXT, DATA_DIMS, EXPERT, KNOWN_DIMS, PIPELINE, PRODUCTS, SHARD, TENSOR

from .sections import Cnn, Digits, Fields, LanguageModel

DATA_PARALLEL: Final = "data_parallel"
LANGUAGE_MODEL: Final = "language_model"


def refused(config: Fields) -> str | None:
    """Return the sentence about the first conflict between fields, or None."""
    return next((sentence for check in CHECKS if (sentence := check(config)) is not None), None)


def _batch(config: Fields) -> str | None:
    if config.global_batch is None and config.batch_per_rank is None:
        return "global_batch is missing. Add it: samples in a step over all processes; or batch_per_rank, for each process."
    if config.global_batch is not None and config.batch_per_rank is not None:
        return (
            f"global_batch ({config.global_batch}) cannot be used with batch_per_rank ({config.batch_per_rank}). Leave one of them "
            "out."
        )
    field = "global_batch" if config.batch_per_rank is None else "batch_per_rank"
    batch = getattr(config, field)
    if batch % config.microbatch:
        fit = max(1, round(batch / config.microbatch)) * config.microbatch
        return (
            f"{field} ({batch}) is not a multiple of microbatch ({config.microbatch}). "
            f"Write {field}: {fit}, or a microbatch that divides it."
        )
    return None


def _following_batch(config: Fields) -> str | None:
    if config.batch_per_rank is None:
        if config.rate_scaling is not None:
            return "rate_scaling needs batch_per_rank, because global_batch never changes. Leave it out, or write batch_per_rank."
        return None
    return _first(
        f"batch_per_rank ({config.batch_per_rank}) cannot be used with {{0}} ({{1}}). Write global_batch, or change {{0}}.",
        ("strategy", config.strategy.name, config.strategy.name != DATA_PARALLEL),
        ("strategy.uneven", "true", _is_uneven(config)),
        ("reduction", "exact", config.reduction == "exact"),
    )


def _strategy(config: Fields) -> str | None:
    strategy = config.strategy
    if _is_uneven(config) and config.reduction == "exact":
        return "strategy.uneven cannot be used with reduction exact, whose bits must not depend on times. Leave one of them out."
    if strategy.name == "data_parallel":
        return None
    if strategy.name == "parameter_server":
        if (strategy.shares_per_version or 1) > config.num_microbatches:
            return (
                f"strategy.shares_per_version ({strategy.shares_per_version}) is more than the microbatches of a batch "
                f"(global_batch / microbatch: {config.num_microbatches}). Lower it, or raise global_batch."
            )
    elif strategy.inner_steps > config.num_microbatches:
        return (
            f"strategy.inner_steps ({strategy.inner_steps}) is more than the microbatches of a step (global_batch / "
            f"microbatch: {config.num_microbatches}). Lower it, or raise global_batch: it counts the samples of all inner steps."
        )
    if config.hook is not None:
        return f"hook ({config.hook.name!r}) cannot be used with strategy {strategy.name}. Leave one of them out."
    return _first(
        f"{{0}} ({{1}}) cannot be used with strategy {strategy.name}. Choose another {{0}}.",
        ("reduction", "exact", config.reduction == "exact"),
        ("precision", "float16", config.precision == "float16"),
    )


def _noise_scale(config: Fields) -> str | None:
    if not config.noise_scale:
        return None
    return _first(
        "noise_scale cannot be measured with {0} {1}. Leave one of them out.",
        ("strategy", config.strategy.name, config.strategy.name != DATA_PARALLEL),
        ("reduction", "exact", config.reduction == "exact"),
        ("precision", "float16", config.precision == "float16"),
        ("hook", "powersgd", _is_powersgd(config)),
    )


def _tensorboard(config: Fields) -> str | None:
    if config.tensorboard is not None:
        return None
    return _first(
        "{0} ({1}) needs tensorboard. Add tensorboard: DIRECTORY, or remove {0}.",
        ("histograms_every", config.histograms_every, config.histograms_every is not None),
        ("profile_at", config.profile_at, config.profile_at is not None),
    )


def _ring(config: Fields) -> str | None:
    if getattr(config.strategy, "algorithm", "") != "ring":
        return None
    return _first(
        "strategy.algorithm ('ring') cannot be used with {0} ({1}). Leave one of them out.",
        ("hook", _hook_name(config), config.hook is not None),
        ("reduction", "exact", config.reduction == "exact"),
    )


def _hook(config: Fields) -> str | None:
    if config.hook is not None and config.reduction == "exact":
        name, does = config.hook.name, "approximates" if _is_powersgd(config) else "rounds"
        return f"hook ({name!r}) {does} gradients, and reduction is exact. Leave one of them out."
    if _is_powersgd(config) and config.precision == "float16":
        return (
            "hook ('powersgd') cannot be used with precision float16, whose scale changes between steps. Use bfloat16, or another "
            "hook."
        )
    return None


def _warmup(config: Fields) -> str | None:
    if config.schedule.warmup_steps >= config.steps:
        return (
            f"schedule.warmup_steps ({config.schedule.warmup_steps}) must be less than steps ({config.steps}). Lower it, or raise "
            "steps."
        )
    return None


# --- experts ---------------------------------------------------------------------------------------------------------


def _experts(config: Fields) -> str | None:
    task = config.task
    if task.name != LANGUAGE_MODEL:
        return None
    if task.experts is None:
        return f"task.top_k ({task.top_k}) needs task.experts. Add it, or remove top_k." if task.top_k > 1 else None
    if task.top_k > task.experts:
        return f"task.top_k ({task.top_k}) is more than task.experts ({task.experts}). Lower it."
    if config.compile:
        return f"compile (true) cannot be used with task.experts ({task.experts}). Leave one of them out."
    for dim in (TENSOR, CONTEXT, PIPELINE):
        if dim in _sizes(config):
            return f"task.experts ({task.experts}) cannot be used with mesh.{dim} ({_sizes(config)[dim]}). Use mesh.expert."
    return None


# --- a mesh ----------------------------------------------------------------------------------------------------------


def _mesh(config: Fields) -> str | None:
    """Refuse fields that work with no mesh, or not with this one. `DIMENSIONS` has the rules of each dimension."""
    sizes = _sizes(config)
    if config.mesh is not None:
        if config.mesh.schedule != "1f1b" and PIPELINE not in sizes:
            return f"mesh.schedule ({config.mesh.schedule}) needs mesh.pipeline above 1. Add it, or remove schedule."
        if not config.mesh.reshard and SHARD not in sizes:
            return "mesh.reshard (false) needs mesh.shard above 1. Add it, or remove reshard."
        if config.mesh.attention != "ulysses" and CONTEXT not in sizes:
            return f"mesh.attention ({config.mesh.attention}) needs mesh.context above 1. Add it, or remove attention."
    if not sizes:
        return None
    mesh = _said(sizes)
    sentence = _first(
        f"{{0}} ({{1}}) cannot be used with {mesh}. Leave one of them out.",
        ("strategy", config.strategy.name, config.strategy.name != DATA_PARALLEL),
        ("strategy.algorithm", "ring", getattr(config.strategy, "algorithm", "") == "ring"),
        ("strategy.uneven", "true", _is_uneven(config)),
        ("batch_per_rank", config.batch_per_rank, config.batch_per_rank is not None),
        ("noise_scale", "true", config.noise_scale),
        ("hook", _hook_name(config), config.hook is not None),
        ("reduction", "exact", config.reduction == "exact"),
        ("precision", "float16", config.precision == "float16"),
        ("histograms_every", config.histograms_every, config.histograms_every is not None),
        ("compile", "true", config.compile and bool(sizes.keys() & {CONTEXT, EXPERT})),
    )
    if sentence is not None:
        return sentence
    if len(sizes) > 1 and set(sizes) not in PRODUCTS:
        known = ", ".join(" with ".join(name for name in KNOWN_DIMS if name in one) for one in PRODUCTS)
        return f"{mesh} has dimensions that do not work together. Choose one, or {known}."
    shares, data = math.prod(sizes.get(dim, 1) for dim in DATA_DIMS), [dim for dim in DATA_DIMS if dim in sizes]
    if config.num_microbatches % shares:
        name = " x ".join(f"mesh.{dim}" for dim in data)
        return (
            f"{name} ({shares}) does not divide the microbatches of a step (global_batch / microbatch: {config.num_microbatches}). "
            "Change one of them."
        )
    return next((sentence for dim in sizes if (sentence := DIMENSIONS[dim](config, sizes)) is not None), None)


def _shard(config: Fields, sizes: Mapping[str, int]) -> str | None:
    assert config.mesh is not None
    if not config.mesh.reshard and PIPELINE in sizes:
        return f"mesh.reshard (false) cannot be used with {_said(sizes)}. Leave it out."
    return None


def _tensor(config: Fields, sizes: Mapping[str, int]) -> str | None:
    tensor, task = sizes[TENSOR], config.task
    if task.name == "cnn":
        return f"mesh.tensor ({tensor}) cannot be used with task cnn, whose layers are not split. Use mesh.shard."
    if task.name == "digits":
        return _divides("mesh.tensor", tensor, "task.width", task.width, task)
    return _divides("mesh.tensor", tensor, "the attention heads", task.heads, task)


def _context(config: Fields, sizes: Mapping[str, int]) -> str | None:
    context, task = sizes[CONTEXT], config.task
    if task.name != LANGUAGE_MODEL:
        return f"mesh.context ({context}) cannot be used with task {task.name}, whose samples are no sequences. Use mesh.shard."
    assert config.mesh is not None
    by_tensor, heads = sizes.get(TENSOR, 1), None
    name = "mesh.context x mesh.tensor" if by_tensor > 1 else "mesh.context"
    if config.mesh.attention == "ulysses":
        heads = _divides(name, context * by_tensor, "the attention heads", task.heads, task)
    return heads or _divides("mesh.context", context, "the tokens of a sample (task.length)", task.sample_tokens, task)


def _expert(config: Fields, sizes: Mapping[str, int]) -> str | None:
    expert, task = sizes[EXPERT], config.task
    if task.name != LANGUAGE_MODEL:
        return f"mesh.expert ({expert}) cannot be used with task {task.name}, which has no experts. Use mesh.shard."
    if task.experts is None:
        return (
            f"mesh.expert ({expert}) needs task.experts. Write task: {{name: language_model, experts: {2 * expert}}}."
        )
    return _divides("mesh.expert", expert, "task.experts", task.experts, task)


def _pipeline(config: Fields, sizes: Mapping[str, int]) -> str | None:
    assert config.mesh is not None
    pipeline, schedule, task = sizes[PIPELINE], config.mesh.schedule, config.task
    if schedule == "zero_bubble" and len(sizes) > 1:
        return f"mesh.schedule (zero_bubble) cannot be used with {_said(sizes)}. Choose gpipe, 1f1b or interleaved."
    if schedule == "zero_bubble" and config.activation_checkpointing == "selective":
        return (
            "activation_checkpointing (selective) cannot be used with mesh.schedule (zero_bubble), which cuts backward in two. "
            "Choose full, or another schedule."
        )
    if task.name == LANGUAGE_MODEL and task.tied:
        return (
            f"mesh.pipeline ({pipeline}) cannot be used with task.tied (true): the first and the last process would share a "
            "parameter. Write tied: false."
        )
    needed, there = pipeline * (2 if schedule == "interleaved" else 1), task.parts
    if needed > there:
        return (
            f"mesh.pipeline ({pipeline}) with schedule {schedule} cuts the model into {needed} parts, and task {task.name} can be "
            f"cut into {there} at most. Choose a smaller pipeline."
        )
    return None


DIMENSIONS: Mapping[str, Callable[[Fields, Mapping[str, int]], str | None]] = {
    SHARD: _shard,
    TENSOR: _tensor,
    CONTEXT: _context,
    EXPERT: _expert,
    PIPELINE: _pipeline,
}
CHECKS: tuple[Callable[[Fields], str | None], ...] = (
    _batch,
    _strategy,
    _following_batch,
    _noise_scale,
    _tensorboard,
    _ring,
    _mesh,
    _experts,
    _hook,
    _warmup,
)


def _divides(field: str, size: int, what: str, many: int, task: Digits | Cnn | LanguageModel) -> str | None:
    if many % size:
        return f"{field} ({size}) does not divide {what} ({many}) of task {task.name}. Choose a size that divides it."
    return None


def _is_uneven(config: Fields) -> bool:
    return bool(getattr(config.strategy, "uneven", False))


def _first(sentence: str, *rows: tuple[str, object, bool]) -> str | None:
    """Return the sentence with the first field and value that are refused, for {0} and {1}. Rows are (field, value, is refused)."""
    return next((sentence.format(field, value) for field, value, is_refused in rows if is_refused), None)


def _hook_name(config: Fields) -> str | None:
    return config.hook.name if config.hook is not None else None


def _is_powersgd(config: Fields) -> bool:
    return _hook_name(config) == "powersgd"


def _sizes(config: Fields) -> dict[str, int]:
    return config.mesh.sizes if config.mesh is not None else {}


def _said(sizes: Mapping[str, int]) -> str:
    return "mesh ({})".format(", ".join(f"{name}: {size}" for name, size in sizes.items()))
