"""How a row of modules is cut into stages, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Dropout, Linear, Sequential

from regroup.errors import UsageError
from regroup.layout import Layout
from regroup.parallel.pipeline import Pipeline, check_model, make


def row() -> Sequential:
    """Return four layers of 6, 6, 6 and 12 parameters, and two without any."""
    return Sequential(Dropout(), Linear(2, 2), Dropout(), Linear(2, 2), Linear(2, 2), Linear(2, 4))


def names(model: Pipeline) -> list[str]:
    return sorted({name.partition(".")[0] for name, _ in model.named_modules() if name})


@pytest.mark.parametrize(
    ("schedule", "stages", "num_ranks", "want"),
    [
        ("1f1b", None, 2, [["0", "1", "2", "3"], ["4", "5"]]),
        ("gpipe", None, 3, [["0", "1", "2"], ["3", "4"], ["5"]]),
        ("interleaved", None, 2, [["0", "1", "2", "4"], ["3", "5"]]),
        ("zero_bubble", 2, 2, [["0", "1", "2", "4"], ["3", "5"]]),
        ("interleaved", None, 1, [["0", "1", "2", "3", "4", "5"]]),
    ],
)
def test_stages_are_balanced_and_keep_their_names(
    schedule: str, stages: int | None, num_ranks: int, want: list[list[str]]
) -> None:
    made = [make(row(), schedule, None, stages, rank, num_ranks) for rank in range(num_ranks)]
    assert [names(one) for one in made] == want
    whole = [name for name, _ in row().named_parameters()]
    assert all(list(one.parameter_order) == whole for one in made)
    assert sorted(name for one in made for name, _ in one.named_parameters()) == sorted(whole)


def test_boundaries_are_the_scripts() -> None:
    made = [make(list(row()), "1f1b", [4], None, rank, 2) for rank in range(2)]
    assert [names(one) for one in made] == [["0", "1", "2", "3"], ["4", "5"]]
    assert [names(make(row(), "1f1b", [2], None, 0, 2))] == [["0", "1"]]


def test_one_process_has_the_whole_model() -> None:
    torch.manual_seed(1)
    model = row().eval()
    x = torch.ones(3, 2)
    assert torch.equal(make(model, "1f1b", None, None, 0, 1)(x), model(x))


class Twice(torch.nn.Module):
    def __init__(self, one: torch.nn.Module) -> None:
        super().__init__()
        self.one = one


def tied() -> Sequential:
    layer = Linear(2, 2)
    return Sequential(layer, Linear(2, 2), Twice(layer))


class Residual(Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return, no-untyped-call]


def frozen() -> Sequential:
    model = row()
    for one in model[1].parameters():
        one.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("modules", "options", "words"),
    [
        (row(), {"schedule": "2f2b"}, "schedule of regroup.pipeline() is '2f2b'; choose from gpipe, 1f1b"),
        (row(), {"stages": 0}, "stages of regroup.pipeline() is 0; it must be a whole number"),
        (row(), {"stages": 2}, 'schedule "1f1b" has one stage on each process'),
        (Residual(Linear(2, 2), Linear(2, 2)), {}, "is a Residual with a forward of its own"),
        (Linear(2, 2), {}, "modules of regroup.pipeline() is a Linear"),
        ([Linear(2, 2), 3], {}, "modules of regroup.pipeline() is a list"),
        (Sequential(Linear(2, 2), Dropout()), {}, "1 modules that have parameters, and pipeline=2"),
        (row(), {"schedule": "interleaved", "stages": 3}, "needs at least 6"),
        (row(), {"boundaries": [0]}, "boundaries of regroup.pipeline() is [0]; it must be 1 ascending numbers between 1 and 5"),
        (row(), {"boundaries": [6]}, "between 1 and 5"),
        (row(), {"boundaries": [2, 3]}, "must be 1 ascending"),
        (row(), {"boundaries": [1]}, "Stage 0 of the pipeline (modules 0 to 0) has no parameter that is trained"),
        (frozen(), {"boundaries": [2]}, "Stage 0 of the pipeline (modules 0 to 1) has no parameter that is trained"),
        (tied(), {}, "0.weight and 2.one.weight are one parameter, and lie in stages 0 and 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused(modules: Any, options: dict[str, Any], words: str) -> None:
    given = {"schedule": "1f1b", "boundaries": None, "stages": None, **options}
    with pytest.raises(UsageError) as raised:
        make(modules, given["schedule"], given["boundaries"], given["stages"], 0, 2)
    assert words in str(raised.value)


def test_a_part_of_a_model_is_not_called() -> None:
    with pytest.raises(UsageError, match=r"has 1 of the model's 2 stages.*Call step\.run\(loss\)"):
        make(row(), "1f1b", None, None, 0, 2)(torch.ones(1, 2))


def test_a_session_takes_what_fits_its_mesh() -> None:
    two = Layout.of({"pipeline": 2})
    check_model(make(row(), "zero_bubble", None, None, 0, 2), two)
    check_model(row(), Layout.of({"shard": 2}))
    with pytest.raises(UsageError, match=r"model is a Sequential, and regroup\.mesh\(\) has pipeline=2"):
        check_model(row(), two)
    with pytest.raises(UsageError, match=r'"zero_bubble" does not work with tensor=2'):
        check_model(make(row(), "zero_bubble", None, None, 0, 2), Layout.of({"tensor": 2, "pipeline": 2}))
