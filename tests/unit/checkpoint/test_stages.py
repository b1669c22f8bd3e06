"""Trees of processes with different layers: one tree of the whole model, as one process would have written it, and back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from regroup.checkpoint import pack, stages, unpack
from regroup.checkpoint.errors import CheckpointError

LAYERS = ["a", "b", "c", "d"]


class Held:
    """Some layers, and an optimizer of them with two groups: weights and biases."""

    def __init__(self, names: Sequence[str], *, several: bool, named: bool) -> None:
        self.model = torch.nn.Sequential(OrderedDict((name, torch.nn.Linear(2, 2)) for name in names))
        groups = [
            [(name, one) for name, one in self.model.named_parameters() if name.endswith(kind)]
            for kind in ("weight", "bias")
        ]
        self.names = [[name for name, _ in group] for group in groups]
        given: list[Any] = groups if named else [[one for _, one in group] for group in groups]
        if several:
            self.optimizers = [
                torch.optim.Adam([{"params": given[0]}]),
                torch.optim.Adam([{"params": given[1]}], lr=0.5),
            ]
            self.names_saved = [[self.names[0]], [self.names[1]]]
        else:
            self.optimizers = [torch.optim.Adam([{"params": given[0]}, {"params": given[1], "lr": 0.5}])]
            self.names_saved = [self.names]

    def step(self) -> None:
        for name, one in self.model.named_parameters():
            with torch.no_grad():
                one.fill_(ord(name[0]) + len(name))
            one.grad = torch.full_like(one, ord(name[0]) + 0.5 * len(name))
        for optimizer in self.optimizers:
            optimizer.step()

    def tree(self) -> dict[str, Any]:
        states = [one.state_dict() for one in self.optimizers]
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": states[0] if len(states) == 1 else {str(i): one for i, one in enumerate(states)},
            "state": {"schedule": {"last": 7}},
            stages.NAMES: self.names_saved,
        }


def as_stored(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    structure, tensors = pack(tree)
    return unpack(structure, stages.Keys(), are_whole=True), tensors


def flat(tree: Any) -> tuple[str, dict[str, list[float]]]:
    structure, tensors = pack(tree)
    return structure, {key: one.flatten().tolist() for key, one in sorted(tensors.items())}


@pytest.mark.parametrize("named", [False, True], ids=["numbers", "param_names"])
@pytest.mark.parametrize("several", [False, True], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize("cut", [["ab", "cd"], ["ac", "bd"], ["a", "b", "cd"], ["ab", "ab", "cd", "cd"]], ids=str)
def test_parts_become_the_tree_of_one_process_and_are_cut_again(cut: list[str], several: bool, named: bool) -> None:
    whole = Held(LAYERS, several=several, named=named)
    whole.step()
    order = [name for name, _ in whole.model.named_parameters()]
    parts, kept = [], []
    for names in cut:
        held = Held(list(names), several=several, named=named)
        held.step()
        tree, tensors = as_stored({**held.tree(), stages.ORDER: order})
        parts.append(tree)
        kept.append((held, tensors))
    together, renamed = stages.merged(parts)
    tensors = {keys[key]: one for keys, (_, own) in zip(renamed, kept) for key, one in own.items()}
    joined = rebuilt(together, tensors)
    expected = whole.tree()
    names_of = joined.pop(stages.NAMES)
    assert names_of == expected.pop(stages.NAMES)
    assert sorted_keys(joined) == sorted_keys(expected)
    for held, _ in kept:
        part = stages.chosen(joined["optimizer"], names_of, held.names_saved)
        assert flat(part) == flat(held.tree()["optimizer"])


def rebuilt(tree: Any, tensors: dict[str, torch.Tensor], path: tuple[str, ...] = ()) -> Any:
    """Put tensors in by their path in the whole tree."""
    if isinstance(tree, stages.Stored):
        return tensors[".".join(path)]
    if isinstance(tree, dict):
        return {key: rebuilt(one, tensors, (*path, str(key))) for key, one in tree.items()}
    return tree


def sorted_keys(tree: Any) -> Any:
    """Return a tree that can be compared: the order of keys does not count."""
    if isinstance(tree, dict):
        return sorted((str(key), sorted_keys(one)) for key, one in tree.items())
    return tree.tolist() if isinstance(tree, torch.Tensor) else tree


def test_optimizer_without_the_parameter_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"no parameter d\.weight"):
        stages.chosen({"state": {}, "param_groups": [{"params": [0]}]}, [[["a.weight"]]], [[["d.weight"]]])
    with pytest.raises(CheckpointError, match="other param groups"):
        stages.chosen({"state": {}, "param_groups": [{"params": [0]}]}, [[["a.weight"]]], [[["a.weight"], []]])


def test_optimizer_of_a_kind_of_its_own_is_left_alone() -> None:
    state = {"anything": 3}
    assert stages.chosen(state, [[]], [[]]) is state


def test_parameters_of_two_optimizers_get_their_names() -> None:
    """An optimizer of a kind of its own, or whose names are not known, stays as it is."""
    plain = {"state": {1: {"step": 3}}, "param_groups": [{"lr": 1.0, "params": [0]}, {"lr": 2.0, "params": [1]}]}
    other = {"anything": 3}
    named = {"state": {"b": {"step": 3}}, "param_groups": [{"lr": 1.0, "params": ["a"]}, {"lr": 2.0, "params": ["b"]}]}
    assert stages.named({"0": plain, "1": other}, [[["a"], ["b"]], []]) == {"0": named, "1": other}
    assert stages.named(plain, [[["a"], ["b"]]]) == named
    assert stages.named(plain, []) is plain
