"""Codes, cookies and names of the page."""

from __future__ import annotations

from itertools import count

from regroup_cli.page.guard import MAX_SESSIONS, Guard, hosts


def test_a_code_opens_the_page_once() -> None:
    guard = Guard()
    code = guard.code
    cookie = guard.redeem(code)
    assert cookie is not None
    assert guard.knows(cookie)
    assert guard.redeem(code) is None
    assert guard.code != code


def test_nothing_else_opens_it() -> None:
    guard = Guard()
    assert guard.redeem("") is None
    assert guard.redeem(guard.code + "x") is None
    assert guard.redeem("\udcff") is None
    assert not guard.knows("")
    assert not guard.knows(guard.code)


def test_codes_are_not_guessed() -> None:
    assert len({Guard().code for _ in range(50)}) == 50
    assert len(Guard().code) >= 32


def test_the_oldest_browser_is_forgotten() -> None:
    numbers = count()
    guard = Guard(lambda: f"text {next(numbers)}")
    cookies = [guard.redeem(guard.code) or "" for _ in range(MAX_SESSIONS + 1)]
    assert [guard.knows(one) for one in cookies] == [False] + [True] * MAX_SESSIONS


def test_names_have_the_port() -> None:
    assert hosts(8000) == {"127.0.0.1:8000", "localhost:8000", "[::1]:8000"}
    assert hosts(80) > {"127.0.0.1", "localhost", "[::1]", "127.0.0.1:80"}


def test_the_secret_of_paths() -> None:
    guard = Guard()
    assert guard.root != Guard().root
    for path, want in (("/", True), ("", True), ("/jobs/a/b", True), ("x/", False)):
        assert guard.is_below_root(guard.root + path) is want
    for path in ("", "/", "*", "//", f"/x{guard.root}/"):
        assert not guard.is_below_root(path)
