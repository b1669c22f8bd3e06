"""DCP's index as Python 3.11.0 to 3.11.3 pickles it: a member of an enum is a getattr. Anything else by getattr is refused."""

import enum
import os
import pickle
from pathlib import Path

import pytest

from regroup.checkpoint import store


class _Layout(enum.Enum):
    STRIDED = 0


def _load(tmp_path: Path, kind: object, name: str) -> object:
    class ByGetattr:
        def __reduce__(self) -> tuple[object, tuple[object, str]]:
            return getattr, (kind, name)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(ByGetattr()))
    return store._reader(tmp_path).read_metadata()


def test_member_of_an_enum_by_getattr_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(store._CLASSES, __name__, ("_Layout",))
    assert _load(tmp_path, _Layout, "STRIDED") is _Layout.STRIDED


@pytest.mark.parametrize("name", ["__class__", "__reduce__", "mro"])
def test_anything_else_of_an_enum_by_getattr_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(store._CLASSES, __name__, ("_Layout",))
    with pytest.raises(pickle.UnpicklingError, match="no part of DCP's format"):
        _load(tmp_path, _Layout, name)


def test_module_by_getattr_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pickle.UnpicklingError, match="no part of DCP's format"):
        _load(tmp_path, os.path.join, "__call__")
