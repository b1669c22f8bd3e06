"""What a user reads when the kubectl proxy has ended."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from regroup_client.api import JOBS, Api, SocketRoute
from regroup_client.errors import ApiError


@pytest.mark.parametrize("is_left", [True, False], ids=["killed, and its socket is left", "ended"])
def test_a_proxy_that_has_ended_is_named(tmp_path: Path, is_left: bool) -> None:
    path = str(tmp_path / "api")
    if is_left:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path)
    with pytest.raises(ApiError, match="its kubectl proxy has ended; start the command again"):
        Api(SocketRoute(path, lambda: "an old error"), "here").get(JOBS, "x")
