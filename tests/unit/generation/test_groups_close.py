"""A backend's destructor may never end, so it must not run in the thread that trains, whoever drops the last reference."""

import threading

from harness.polling import until
from regroup.generation import groups


class Backend:
    def __init__(self, ended_in: list[str]) -> None:
        self.ended_in = ended_in

    def __del__(self) -> None:
        self.ended_in.append(threading.current_thread().name)


def test_backend_that_is_still_referred_to_ends_in_the_closing_thread() -> None:
    ended_in: list[str] = []
    backend = Backend(ended_in)
    closing = threading.Thread(target=groups._let_go, args=([backend, Backend(ended_in)],), name="closing", daemon=True)
    closing.start()
    until(lambda: ended_in, "the first backend ends")
    assert ended_in == ["closing"]  # the one that nobody else refers to
    del backend
    closing.join(30)
    assert ended_in == ["closing", "closing"]
