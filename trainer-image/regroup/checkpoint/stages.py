"""Joins the trees of processes that hold different layers of one model, and cuts the whole tree for one process. Pure.

An optimizer's state_dict knows its parameters by number, and each process of a pipeline counts its own. So a saved tree has
the parameters' names by optimizer and param group (`NAMES`). Trees here have a `Stored` in place of each tensor.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .errors import CheckpointError
from .tree import leaves, mapped

NAMES = "parameters"
"""Section of a saved tree with the names of the optimizers' parameters: [optimizer][param group][parameter]."""
ORDER = "order"
"""Section of a pipeline part's tree with the names of all of the model's parameters, in the model's order."""
Names = Sequence[Sequence[Sequence[str]]]
_OPTIMIZER = "optimizer"


class Stored(NamedTuple):
    """The key of a stored tensor, in place of the tensor."""

    key: str


class Keys(dict[str, Any]):
    """A mapping that gives `tree.unpack` a `Stored` for each key, if the tensors have not been read."""

    def __missing__(self, key: str) -> Stored:
        return Stored(key)


def stored(value: Any) -> dict[str, Stored]:
    """Return each Stored of a tree by its dotted path."""
    return {path: one for path, one in leaves(value).items() if isinstance(one, Stored)}


def with_tensors(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the tree with a tensor in place of each Stored."""
    return mapped(value, lambda _, one: tensors[one.key] if isinstance(one, Stored) else one)


def merged(parts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Return the tree of the whole model, and for each part the new keys of its tensors by their old keys.

    Parameters are numbered in the model's order, group after group, as in an optimizer of the whole model. If several parts have
    an entry, that of the first one counts.
    """
    place = {name: i for i, name in enumerate(parts[0][ORDER])}
    groups: list[list[list[str]]] = []
    for optimizers in zip(*(part[NAMES] for part in parts), strict=True):
        together = [
            list(dict.fromkeys(name for names in same for name in names)) for same in zip(*optimizers, strict=True)
        ]
        groups.append([sorted(names, key=place.__getitem__) for names in together])
    whole: dict[str, Any] = {}
    renamed = []
    for part in parts:
        tree = {key: one for key, one in part.items() if key not in (NAMES, ORDER)}
        tree[_OPTIMIZER] = renumbered(part[_OPTIMIZER], part[NAMES], groups)
        renamed.append({one.key: path for path, one in stored(tree).items()})
        whole = _union(whole, tree)
    whole[_OPTIMIZER] = _grouped(
        whole[_OPTIMIZER], [part[_OPTIMIZER] for part in parts], [part[NAMES] for part in parts], groups
    )
    return {**whole, NAMES: groups}, renamed


def chosen(optimizer: Any, names: Names, own: Names) -> Any:
    """Return the part of an optimizer's state_dict for the parameters of one process. Raises CheckpointError if one is missing.

    `names` are the parameters of the state_dict, `own` those of this process's optimizer.
    """
    if [[list(group) for group in one] for one in names] == [[list(group) for group in one] for one in own]:
        return optimizer
    known = {name for one in names for group in one for name in group}
    lacking = [name for one in own for group in one for name in group if name not in known]
    if lacking or [len(one) for one in names] != [len(one) for one in own]:
        what = f"no parameter {lacking[0]}" if lacking else "other param groups"
        raise CheckpointError(f"Its optimizer has {what}. Build the optimizer as the script that wrote it did.")
    return _grouped(renumbered(optimizer, names, own), [optimizer], [names], own)


def renumbered(optimizer: Any, names: Names, others: Names) -> Any:
    """Return an optimizer's state_dict with each parameter under its number among `others`. Other parameters are left out."""
    out = []
    for one, before, after in zip(_parts_of(optimizer, len(names)), names, others, strict=True):
        if not _is_plain(one):
            out.append(one)
            continue
        number = {name: i for i, name in enumerate(name for group in after for name in group)}
        flat = [name for group in before for name in group]
        state = {number[flat[i]]: held for i, held in one["state"].items() if flat[i] in number}
        out.append({**one, "state": state})
    return _together(optimizer, out)


def named(optimizer: Any, names: Names) -> Any:
    """Return an optimizer's state_dict with each parameter's name in place of its number."""
    out = []
    for one, groups in zip(_parts_of(optimizer, len(names)), names):
        if _is_plain(one):
            flat = [name for group in groups for name in group]
            state = {flat[i]: held for i, held in one["state"].items()}
            settings = [{**group, "params": [flat[i] for i in group["params"]]} for group in one["param_groups"]]
            one = {**one, "state": state, "param_groups": settings}
        out.append(one)
    return _together(optimizer, out) if out else optimizer


def _grouped(optimizer: Any, sources: Sequence[Any], names: Sequence[Names], groups: Names) -> Any:
    """Return an optimizer's state_dict with these parameters in its groups, numbered in their order, and their `param_names`.

    `sources` with their `names` are the state_dicts that know the `param_names`.
    """
    out = []
    for number, one in enumerate(_parts_of(optimizer, len(groups))):
        if _is_plain(one):
            given: dict[str, str] = {}
            for source, own in zip(sources, names):
                given |= _given_names(_parts_of(source, len(groups))[number], own[number])
            one = {**one, "param_groups": _param_groups(one["param_groups"], groups[number], given)}
        out.append(one)
    return _together(optimizer, out)


def _given_names(optimizer: Any, own: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the names that the script gave to an optimizer's parameters (`named_parameters`), by the model's names."""
    given: dict[str, str] = {}
    for group, mine in zip(optimizer["param_groups"], own):
        given |= dict(zip(mine, group.get("param_names", ())))
    return given


def _param_groups(settings: Sequence[Any], members: Sequence[Sequence[str]], given: Mapping[str, str]) -> list[Any]:
    """Return the param groups with these members, which are numbered through all groups."""
    low, out = 0, []
    for group, names in zip(settings, members):
        new = {**group, "params": list(range(low, low + len(names)))}
        if "param_names" in group:
            new["param_names"] = [given[name] for name in names]
        out.append(new)
        low += len(names)
    return out


def _is_plain(optimizer: Any) -> bool:
    return isinstance(optimizer, dict) and {"state", "param_groups"} <= set(optimizer)


def _parts_of(optimizer: Any, count: int) -> list[Any]:
    """Return the state_dict of each optimizer. In a tree several optimizers are numbered."""
    return [optimizer[str(i)] for i in range(count)] if _is_numbered(optimizer, count) else [optimizer]


def _together(like: Any, parts: Sequence[Any]) -> Any:
    return {str(i): one for i, one in enumerate(parts)} if _is_numbered(like, len(parts)) else parts[0]


def _is_numbered(optimizer: Any, count: int) -> bool:
    return isinstance(optimizer, dict) and set(optimizer) == {str(i) for i in range(count)}


def _union(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        both = {key: _union(held, other[key]) if key in other else held for key, held in one.items()}
        return {**both, **{key: held for key, held in other.items() if key not in one}}
    return one
