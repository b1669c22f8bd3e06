"""The page in Chromium: each view by axe-core, by keyboard, in a narrow window, and while things change or are away.

`make test-page` installs what is missing, and runs this.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page as Tab

from harness.sample_jobs import NAMESPACE, SampleJobs, job, lines, many, pods_of, sample
from harness.screenshots import SampleSource, browser, chromium
from regroup_cli.page import cache
from regroup_cli.page.server import Page, serve
from regroup_client.errors import ApiError

ROOT = Path(__file__).resolve().parents[2]
AXE = ROOT / ".cache" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
JOB = f"/jobs/{NAMESPACE}/resnet50"
VIEWS = ("/", JOB, f"{JOB}/logs", "/nothing")
AWAY = ApiError(0, "NoAnswer", "The API server gave no answer (connection refused). Try again.")
HOSTILE = "</li><script>alert(1)</script><img src=x onerror=alert(2)>"

pytestmark = [
    pytest.mark.skipif(
        chromium() is None or not AXE.exists(), reason="Chromium or axe-core is missing: make test-page"
    ),
    pytest.mark.timeout(300),
]


@pytest.fixture(autouse=True)
def quick_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a reading takes seconds, and the page would rest for many times that."""
    monkeypatch.setattr(cache, "MAX_REST_S", 2.0)
    monkeypatch.setattr(cache, "RETRY_S", 2.0)


def visit(
    jobs: SampleJobs,
    test: Callable[[Tab, Page], Awaitable[None]],
    *,
    width: int = 1200,
    dark: bool = False,
    path: str = "/",
    end: Callable[[Tab], Awaitable[None]] | None = None,
) -> None:
    """Open a path of the page, run a test, and then `end`, after the page's server has ended.

    Errors in the browser fail the test.
    """

    async def run() -> None:
        errors: list[str] = []
        async with browser() as started:
            serving = await serve(SampleSource(jobs), 0, lambda _: None)
            try:
                scheme: Any = "dark" if dark else "light"
                context = await started.new_context(
                    viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
                )
                tab = await context.new_page()
                tab.on("console", lambda said: errors.append(said.text) if said.type in ("error", "warning") else None)
                tab.on("pageerror", lambda error: errors.append(str(error)))
                tab.on("dialog", lambda dialog: errors.append(f"dialog {dialog.message}"))
                await open_page(tab, serving.page, path)
                await test(tab, serving.page)
                assert not [error for error in errors if "status of 404" not in error]
            finally:
                await serving.close()
            if end is not None:
                await end(tab)

    asyncio.run(run())


async def open_page(tab: Tab, page: Page, path: str) -> None:
    await tab.goto(page.address())
    await tab.wait_for_url(lambda url: "code" not in url)
    await tab.goto(url(page, path))


def url(page: Page, path: str) -> str:
    return page.address(path).partition("?")[0]


async def overflow(tab: Tab) -> int:
    found: int = await tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_views_are_accessible_and_fit(width: int, dark: bool) -> None:
    async def test(tab: Tab, page: Page) -> None:
        for path in VIEWS:
            await tab.goto(url(page, path))
            await tab.evaluate(AXE.read_text())
            found = await tab.evaluate("axe.run(document, {resultTypes: ['violations']})")
            violations = [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found["violations"]]
            assert not violations, path
            assert await overflow(tab) <= 0, path

    visit(sample(), test, width=width, dark=dark)


def test_long_names_fit_a_narrow_window() -> None:
    long = job("x" * 63, namespace=NAMESPACE)
    long["status"]["incidents"] = [{"generation": 2, "at": "?", "cause": "y" * 63, "decision": "z" * 500, "workers": 2}]
    long["status"]["summary"] |= {"step": "123456789012", "loss": "1234567890"}

    async def test(tab: Tab, page: Page) -> None:
        for path in ("/", f"/jobs/{NAMESPACE}/{'x' * 63}", f"/jobs/{NAMESPACE}/{'x' * 63}/logs"):
            await tab.goto(url(page, path))
            assert await overflow(tab) <= 0, path

    jobs = SampleJobs([long], {}, {}, {"x" * 63: [b"2026-11-28T10:00:00Z " + b"w" * 3000 + b"\n"]})
    visit(jobs, test, width=400)


def test_the_keyboard_is_enough() -> None:
    async def test(tab: Tab, page: Page) -> None:  # noqa: ARG001
        await tab.keyboard.press("Tab")
        assert await tab.evaluate("document.activeElement.className") == "skip"
        await tab.keyboard.press("Enter")
        for _ in range(3):  # the filter, its button, the first job
            await tab.keyboard.press("Tab")
        assert await tab.evaluate("document.activeElement.textContent") == "resnet50"
        await tab.keyboard.press("Enter")
        await tab.wait_for_url(f"**{JOB}")
        await tab.get_by_role("link", name="Logs of worker 7").focus()
        await tab.keyboard.press("Enter")
        await tab.wait_for_url("**/logs?of=slot-7")
        await tab.get_by_role("region", name="Log, the newest line at the end").focus()
        before = await tab.evaluate("document.activeElement.scrollTop")
        await tab.keyboard.press("PageUp")
        await tab.wait_for_function("before => document.activeElement.scrollTop < before", arg=before)

    visit(sample(), test)


def test_pieces_change_alone_and_focus_and_selection_stay() -> None:
    jobs = sample()

    async def test(tab: Tab, page: Page) -> None:
        await tab.get_by_role("link", name="bert-tiny").focus()
        await tab.evaluate("document.getElementById('piece').isOld = true")
        async with tab.expect_response(lambda one: "/piece" in one.url) as answer:
            pass
        assert (await answer.value).status == 204
        assert await tab.evaluate("document.getElementById('piece').isOld")
        jobs.objects[0]["status"]["summary"]["loss"] = "0.1234"
        await tab.get_by_text("0.1234").wait_for()
        assert await tab.evaluate("document.activeElement.textContent") == "bert-tiny"
        assert tab.url == url(page, "/")

    visit(jobs, test)


FIRST_LINE = """() => {
    const log = document.querySelector(".log"), top = log.getBoundingClientRect().top;
    return [...log.querySelectorAll("li")].find((one) => one.getBoundingClientRect().bottom > top).textContent;
}"""
TWO_POLLS = """new Promise((done) => {
    let count = 0;
    document.addEventListener("htmx:beforeRequest", () => { if (++count === 2) done(); });
})"""


def test_a_log_follows_at_its_end_and_stands_still_while_it_is_read() -> None:
    jobs = sample()
    log = [lines(0, 100)]
    jobs.output = {"resnet50": log}

    async def test(tab: Tab, page: Page) -> None:  # noqa: ARG001
        def add(count: int) -> None:
            """Replace the oldest lines by new ones, as `tail` does."""
            log[0] = b"".join(lines(0, 100).splitlines(keepends=True)[count:])
            log[0] += b"".join(b"2026-11-28T10:30:00Z added %d\n" % one for one in range(1, count + 1))

        add(1)
        await tab.get_by_text("added 1").wait_for(state="attached")
        assert await tab.evaluate("document.querySelector('.log').scrollTop") == 0
        await tab.evaluate("document.querySelector('.log').scrollTop = -600")
        before = await tab.evaluate(FIRST_LINE)
        add(2)
        await tab.evaluate(TWO_POLLS)
        assert await tab.evaluate(FIRST_LINE) == before
        await tab.evaluate("document.querySelector('.log').scrollTop = 0")
        await tab.get_by_text("added 2").wait_for(state="attached")
        await tab.evaluate("getSelection().selectAllChildren(document.querySelector('.log li:last-child'))")
        add(3)
        await tab.evaluate(TWO_POLLS)
        assert "added 2" in await tab.evaluate("getSelection().toString()")
        await tab.evaluate("getSelection().removeAllRanges()")
        await tab.get_by_text("added 3").wait_for(state="attached")

    visit(jobs, test, path=f"{JOB}/logs?of=slot-0")


def test_the_page_says_that_the_api_is_away_and_that_its_server_has_ended() -> None:
    jobs = sample()

    async def test(tab: Tab, page: Page) -> None:  # noqa: ARG001
        jobs.trouble = AWAY
        await tab.get_by_role("status").get_by_text("connection refused").wait_for()
        assert await tab.get_by_text("resnet50").first.is_visible()
        jobs.trouble = None
        await tab.get_by_text("connection refused").wait_for(state="hidden")
        assert not await tab.get_by_role("alert").is_visible()

    async def end(tab: Tab) -> None:
        await tab.get_by_role("alert").get_by_text("does not answer").wait_for()
        asked: list[str] = []
        tab.on("request", lambda one: asked.append(one.url))
        await tab.evaluate(TWO_POLLS)
        assert not asked  # another user's server may listen on the port by now
        assert await tab.get_by_text("resnet50").first.is_visible()

    visit(jobs, test, end=end)


def test_hostile_texts_are_only_shown() -> None:
    one = job("digits", summary={"state": HOSTILE, "loss": HOSTILE})
    one["status"]["incidents"] = [{"generation": 2, "at": "?", "cause": HOSTILE, "decision": HOSTILE, "workers": 1}]
    one["status"]["progress"] = {"curve": ["0 0 1", "1 1 2"]}
    output = f"2026-11-28T10:00:00Z {HOSTILE}\n".encode()

    async def test(tab: Tab, page: Page) -> None:
        for path in ("/", f"/jobs/{NAMESPACE}/digits", f"/jobs/{NAMESPACE}/digits/logs"):
            await tab.goto(url(page, path))
            await tab.get_by_text("<script>alert(1)</script>").first.wait_for()
            assert await tab.evaluate("document.scripts.length") == 2
            assert await tab.evaluate("[...document.images].every(one => one.src.endsWith('/static/icon.svg'))")

    visit(SampleJobs([one], {}, {}, {"digits": [output]}), test)  # visit fails after a dialog


def test_what_is_not_ours_is_blocked() -> None:
    async def test(tab: Tab, page: Page) -> None:  # noqa: ARG001
        ran = await tab.evaluate(
            """async () => {
                const add = (tag, fill) => { const made = document.createElement(tag); fill(made); document.body.append(made); };
                window.ran = [];
                add("script", (made) => { made.textContent = "window.ran.push('inline')"; });
                add("div", (made) => { made.setAttribute("onclick", "window.ran.push('handler')"); made.click(); });
                const before = getComputedStyle(document.body).color;
                add("style", (made) => { made.textContent = "body { color: red !important }"; });
                if (getComputedStyle(document.body).color !== before) window.ran.push("style");
                await fetch("http://127.0.0.1:9/").then(() => window.ran.push("fetch"), () => null);
                return window.ran;
            }"""
        )
        assert ran == []

    with pytest.raises(AssertionError, match="Content Security Policy"):  # the browser says so, and visit hears it
        visit(sample(), test)


def test_500_jobs_of_64_workers_do_not_lag() -> None:
    every = many(500, 64)
    jobs = SampleJobs(
        every, {"sweep-000": pods_of(every[0])}, {}, {"sweep-000": [lines(slot, 30) for slot in range(64)]}
    )

    async def test(tab: Tab, page: Page) -> None:
        await tab.evaluate(
            """() => {
                window.longest = 0;
                new PerformanceObserver((list) => {
                    for (const one of list.getEntries()) window.longest = Math.max(window.longest, one.duration);
                }).observe({type: "longtask"});
            }"""
        )
        every[1]["status"]["summary"]["loss"] = "0.7777"
        await tab.get_by_text("0.7777").wait_for()
        # 20 to 60 ms on an idle machine.
        assert await tab.evaluate("window.longest") < 1000
        for path in (f"/jobs/{NAMESPACE}/sweep-000", f"/jobs/{NAMESPACE}/sweep-000/logs"):
            began_s = time.monotonic()
            await tab.goto(url(page, path))
            assert time.monotonic() - began_s < 10  # 0.3 s on an idle machine
        assert {one for one in jobs.asked if one != "all"} == {"read sweep-000", "logs sweep-000"}

    visit(jobs, test)
