"""What is asked of a process that ends meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness import processes


def test_process_that_runs() -> None:
    own = os.getpid()
    assert processes.alive(own)
    assert processes.start_of(own) > 0
    assert processes.environment_of(own)["PATH"]
    assert own in processes.children(os.getppid())


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(FileNotFoundError, id="it had ended before"),
        pytest.param(ProcessLookupError, id="it has ended between the look and the read"),
    ],
)
def test_process_that_has_ended_says_nothing(error: type[OSError], monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(Path, "read_text", ended)
    assert not processes.alive(1)
    assert (processes.name_of(1), processes.waits_in(1), processes.start_of(1)) == ("", "", -1)
    assert (processes.environment_of(1), processes.children(1)) == ({}, [])
