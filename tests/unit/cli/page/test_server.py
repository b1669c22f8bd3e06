"""The page as browsers get it: who may read it, what it shows, and what it asks for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession, CookieJar

from harness.sample_jobs import NAMESPACE, SampleJobs, job, lines, many, pods_of, resnet, sample
from harness.screenshots import SampleSource
from regroup_cli.page import cache, guard, server, shown, sources
from regroup_cli.page.server import Page, Serving, serve
from regroup_client.errors import ApiError

HOSTILE = "</pre><script>alert(1)</script>\x1b[31m\x1b]8;;http://evil\x07 \u202egnp.exe"
JOB = f"/jobs/{NAMESPACE}/resnet50"
AWAY = ApiError(0, "NoAnswer", "The API server gave no answer (connection refused). Try again.")


class Browser:
    """A browser without a window."""

    def __init__(self, session: ClientSession, page: Page, said: list[str]) -> None:
        self._session, self.page, self.said = session, page, said
        self.origin = f"http://127.0.0.1:{page._port}"
        self.root = page.guard.root

    def url(self, path: str) -> str:
        """Return the address of a path. One that is asked without the page's secret begins with //."""
        has_all = path.startswith((self.root, "/static/", "//"))
        return self.origin + (path.replace("//", "/", 1) if has_all else self.root + path)

    async def get(self, path: str, **headers: str) -> tuple[ClientResponse, str]:
        async with self._session.get(self.url(path), headers=headers, allow_redirects=False) as response:
            return response, await response.text()

    async def enter(self) -> None:
        response, text = await self.get("/?code=" + self.page.guard.code)
        assert response.status == 200, text

    async def text(self, path: str) -> str:
        response, text = await self.get(path)
        assert response.status == 200, text
        return text

    async def ask(self, method: str, path: str) -> int:
        async with self._session.request(method, self.url(path)) as response:
            return response.status


def browse(jobs: SampleJobs, test: Callable[[Browser], Awaitable[None]], *, enter: bool = True) -> None:
    async def run() -> None:
        said: list[str] = []
        serving: Serving = await serve(SampleSource(jobs), 0, said.append)
        try:
            async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:  # unsafe: of an address
                browser = Browser(session, serving.page, said)
                if enter:
                    await browser.enter()
                await test(browser)
        finally:
            await serving.close()

    asyncio.run(run())


def again(text: str) -> str:
    """Return the address with which htmx asks for the piece again."""
    found = re.search(r'hx-get="([^"]*)"', text)
    assert found is not None, text
    return found[1].replace("&amp;", "&")


# --- who may read it


def test_the_code_becomes_a_cookie_once() -> None:
    async def test(browser: Browser) -> None:
        address = f"/jobs/a/b?code={browser.page.guard.code}"
        response, text = await browser.get(address)
        cookie = response.headers["Set-Cookie"]
        assert cookie.startswith("regroup=")
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert f"Path={browser.root}/;" in cookie  # no other server on this host gets it
        assert f'content="0;url={browser.root}/jobs/a/b"' in text
        assert browser.said == [f"for another browser: {browser.page.address()}"]
        response, text = await browser.get(address)
        assert response.status == 404  # let in already, and there is no such job
        browser._session.cookie_jar.clear()
        response, text = await browser.get(address)
        assert response.status == 403
        assert "was used already" in text

    browse(sample(), test, enter=False)


@pytest.mark.parametrize("path", ["/", "/piece", JOB, f"{JOB}/logs", "/no/such/page", "//"])
def test_without_the_cookie_nothing_is_shown_or_asked(path: str) -> None:
    jobs = sample()

    async def test(browser: Browser) -> None:
        response, text = await browser.get(path, Cookie=f"regroup={browser.page.guard.code}")
        assert response.status == 403
        assert not [secret for secret in ("resnet50", NAMESPACE, browser.root) if secret in text]
        assert not jobs.asked

    browse(jobs, test, enter=False)


def test_the_cookie_does_not_help_without_the_secret_of_the_path() -> None:
    async def test(browser: Browser) -> None:
        (cookie,) = browser._session.cookie_jar
        sent = {"Cookie": f"regroup={cookie.value}"}
        assert (await browser.get("/", **sent))[0].status == 200
        for path in ("//", f"/{JOB}", f"//x{JOB}", f"//?code={browser.page.guard.code}"):
            response, text = await browser.get(path, **sent)
            assert response.status == 403, path
            assert browser.root not in text

    browse(sample(), test)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", ""])
def test_other_hosts_are_refused(host: str) -> None:
    async def test(browser: Browser) -> None:
        for path in ("/", "/static/page.css", f"/?code={browser.page.guard.code}"):
            response, text = await browser.get(path, Host=host.format(port=browser.page._port))
            assert response.status == 403
            assert "ssh -L" in text
            assert not [secret for secret in (NAMESPACE, browser.root) if secret in text]
        assert (await browser.get("/", Host=f"localhost:{browser.page._port}"))[0].status == 200
        assert (await browser.get("/"))[0].status == 200

    browse(sample(), test)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_only_get_is_answered(method: str) -> None:
    async def test(browser: Browser) -> None:
        assert await browser.ask(method, "/") == 405
        assert await browser.ask(method, JOB) == 405
        assert await browser.ask(method, "/static/page.css") == 405

    browse(sample(), test)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 200),
        (JOB, 200),
        (f"{JOB}/logs/piece", 200),
        ("/static/htmx-2.0.11.min.js", 200),
        ("/static/nothing.css", 404),
        ("/static/..%2ftemplates%2fbase.html", 404),
        ("/static/../server.py", 403),
        ("/nothing", 404),
        ("/jobs/other/resnet50", 404),
        (f"/jobs/{NAMESPACE}/nothing", 404),
        (f"/jobs/{NAMESPACE}/nothing/logs", 404),
        (f"/jobs/{NAMESPACE}/%2e%2e%2f%2e%2e/logs", 404),
    ],
)
def test_every_answer_has_the_headers(path: str, status: int) -> None:
    async def test(browser: Browser) -> None:
        response, text = await browser.get(path)
        assert response.status == status, text
        assert {name: response.headers.get(name) for name in guard.HEADERS} == guard.HEADERS
        assert "Server" not in response.headers

    browse(sample(), test)


def test_the_policy_allows_nothing_inline_and_no_other_host() -> None:
    async def test(browser: Browser) -> None:
        for path in ("/", JOB, f"{JOB}/logs", "/nothing"):
            _, text = await browser.get(path)
            assert not re.findall(r"<script(?![^>]*\ssrc=\"/static/)|<style|\sstyle=|\son\w+=|hx-on|hx-vals=.js:", text)
            assert not re.findall(r"""(?:src|href|action)=["'](?!/|#)""", text)
            assert "http" not in text.replace("http-equiv", "")
        assert '"allowEval":false' in await browser.text("/")

    browse(sample(), test)
    assert "unsafe" not in guard.HEADERS["Content-Security-Policy"]


def test_nothing_that_is_sent_to_the_port_writes_to_the_terminal(caplog: pytest.LogCaptureFixture) -> None:
    async def test(browser: Browser) -> None:
        for sent in (b"GET /?text=\xff HTTP/1.1", b"GET /\xff/ HTTP/1.1", b"\xff\xff", b"GET / HTTP/9"):
            reader, writer = await asyncio.open_connection("127.0.0.1", browser.page._port)
            writer.write(sent + b"\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n\r\n" % browser.page._port)
            assert (await reader.read()).startswith(b"HTTP/1."), sent
            writer.close()

    browse(sample(), test)
    assert not caplog.records


def test_a_bug_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "choose", lambda *_: 1 / 0)

    async def test(browser: Browser) -> None:
        response, text = await browser.get("/")
        assert response.status == 500
        assert "The page cannot show this (ZeroDivisionError)." in text

    browse(sample(), test)


def test_a_terminal_that_nobody_reads_keeps_nobody_out() -> None:
    async def test(browser: Browser) -> None:
        def say(_: str) -> None:
            raise BrokenPipeError

        browser.page._say = say
        await browser.enter()
        assert "resnet50" in await browser.text("/")

    browse(sample(), test, enter=False)


# --- what it shows


def test_a_link_keeps_its_id_when_other_jobs_come() -> None:
    """htmx gives the focus back to the link with the same id."""
    jobs = sample()

    def id_of(text: str) -> str:
        found = re.search(r'<a id="([^"]*)"[^>]*>resnet50<', text)
        assert found is not None, text
        return found[1]

    async def test(browser: Browser) -> None:
        before = id_of(await browser.text("/"))
        jobs.objects.append(job("aaa", "Running", namespace=NAMESPACE))
        browser.page.cache._entries.clear()
        text = await browser.text("/")
        assert text.index(">aaa<") < text.index(">resnet50<")
        assert id_of(text) == before

    browse(jobs, test)


def test_views_show_what_is_known() -> None:
    async def test(browser: Browser) -> None:
        text = await browser.text("/")
        for expected in (
            "resnet50",
            "vit-large",
            "bert-tiny",
            "12/12",
            "36m",
            "CUDA out of memory",
            f'{browser.root}{JOB}"',
        ):
            assert expected in text
        text = await browser.text(JOB)
        for expected in (
            "resnet50 is Running.",
            "Steps per second",
            "Loss: from",
            "Workers over 1.5 h: now 12, most 12; failures: 2, planned changes: 3",
            "Node gpu-b lost power",
            "gpu-c",
            "resnet50-worker-5-2",
            "A step takes 0.17 s",
            "Worker 9 is slowest",
            "NodeLost",
            "3 times",
            "g6-s31500",
        ):
            assert expected in text, expected
        text = await browser.text(f"{JOB}/logs?of=slot-7")
        assert text.count("[7.7]") == 40
        assert "[6.6]" not in text
        text = await browser.text(f"{JOB}/logs?text=32402")
        assert len(re.findall(r"\[\d+\.\d+\]</b>", text)) == 12

    browse(sample(), test)


def test_hostile_texts_do_nothing() -> None:
    one = job("digits", summary={"state": HOSTILE, "ready": HOSTILE, "step": HOSTILE, "loss": HOSTILE})
    one["status"]["incidents"] = [{"generation": 2, "at": HOSTILE, "cause": HOSTILE, "decision": HOSTILE, "workers": 1}]
    one["status"]["progress"] = {"stepTime": f"1 s: backward 61 % ({HOSTILE})", "curve": ["0 0 1", "1 1 2"]}
    one["metadata"]["name"] = name = "x'\"><img src=x onerror=alert(1)>"
    pods = [{"metadata": {"name": f"{name}-worker-0-0"}, "spec": {"nodeName": HOSTILE}, "status": {"phase": HOSTILE}}]
    events = [{"type": "Warning", "reason": HOSTILE, "note": HOSTILE, "eventTime": HOSTILE, "count": 1}]
    output = [f"2026-11-28T10:00:00Z {HOSTILE}\n".encode()]
    jobs = SampleJobs([one], {name: pods}, {name: events}, {name: output})

    async def test(browser: Browser) -> None:
        address = re.search(r'href="[^"]*(/jobs/[^"]*)"', await browser.text("/"))
        assert address is not None
        for path in ("/", "/?text=" + "%3Cscript%3Ealert(1)", address[1], f"{address[1]}/logs"):
            text = await browser.text(path)
            assert "<script>" not in text
            assert "<img src=x" not in text
            assert not re.findall("[\x00-\x08\x0b-\x1f\u202e]", text)
        logs = await browser.text(f"{address[1]}/logs")
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in logs
        assert "\\x202egnp.exe" in logs

    browse(jobs, test)


def test_a_piece_that_has_not_changed_is_not_sent_again() -> None:
    jobs = sample()

    async def test(browser: Browser) -> None:
        for path in ("/?text=resnet", JOB, f"{JOB}/logs?of=slot-1"):
            address = again(await browser.text(path))
            assert (await browser.get(address))[0].status == 204
            text = await browser.text(re.sub("have=.*", "have=0", address))
            assert again(text) == address
            assert text.lstrip().startswith('<div id="piece"')
        browser.page.cache._entries.clear()
        jobs.objects[0]["status"]["summary"]["loss"] = "0.1234"
        assert "0.1234" in await browser.text(again(await browser.text("/")).replace("have=", "have=x"))

    browse(jobs, test)


def test_while_the_api_is_away_the_page_says_so_and_keeps_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FRESH_S", 0.0)
    monkeypatch.setattr(cache, "RETRY_S", 0.0)
    monkeypatch.setattr(cache, "REST", 0.0)
    jobs = sample()

    async def test(browser: Browser) -> None:
        address = {path: again(await browser.text(path)) for path in ("/", JOB, f"{JOB}/logs")}
        jobs.trouble = AWAY
        for path, piece in address.items():
            text = await browser.text(piece)
            assert "gave no answer (connection refused)" in text, path
            assert "It is tried again." in text
            assert "This is as of" in text
            assert "resnet50" in await browser.text(path)
            assert (await browser.get(again(text)))[0].status == 204  # said once
        jobs.trouble = None
        for path in address:
            assert "gave no answer" not in await browser.text(path)
        jobs.trouble = ApiError(403, "Forbidden", "You may not list jobs.")
        response, text = await browser.get(JOB)
        assert response.status == 404
        assert "You may not list jobs." in text
        assert "gpu-c" not in text

    browse(jobs, test)


def test_the_first_page_while_the_api_is_away() -> None:
    jobs = sample()
    jobs.trouble = AWAY

    async def test(browser: Browser) -> None:
        text = await browser.text("/")
        assert "gave no answer" in text
        assert "There are no training jobs" not in text
        assert "gave no answer" in await browser.text(f"{JOB}/logs")

    browse(jobs, test)


def test_logs_that_have_not_come_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sources, "tail", lambda *_: sources.Tail([], "The logs of 2 workers were not read to their end within 20 s.")
    )

    async def test(browser: Browser) -> None:
        text = await browser.text(f"{JOB}/logs")
        assert "The logs of 2 workers were not read to their end within 20 s." in text
        assert "No lines" not in text

    browse(sample(), test)


def test_a_text_that_is_searched_for_is_bounded() -> None:
    async def test(browser: Browser) -> None:
        for path in ("/", f"{JOB}/logs"):
            text = await browser.text(f"{path}?text={'x' * 5000}")
            assert max(map(len, re.findall("x+", text))) == server.MAX_SEARCH

    browse(sample(), test)


# --- what it costs


def test_500_jobs_cost_one_request_and_pods_are_those_of_the_open_job() -> None:
    jobs = SampleJobs([*many(500, 64), resnet()], {"resnet50": pods_of(resnet())}, {}, {"resnet50": [lines(0)]})

    async def test(browser: Browser) -> None:
        text = await browser.text("/")
        assert "501 jobs" in text
        assert text.count('scope="row"') == 100
        assert len(text) < 120_000
        assert jobs.asked == ["all"]
        await browser.text("/?page=5")
        await browser.text("/?text=sweep-499")
        assert jobs.asked == ["all"]
        await browser.text(JOB)
        await browser.text(JOB)
        assert jobs.asked == ["all", "read resnet50"]
        await browser.text(f"{JOB}/logs")
        assert jobs.asked == ["all", "read resnet50", "logs resnet50"]

    browse(jobs, test)


def test_two_browsers_cost_what_one_does() -> None:
    jobs = sample()

    async def test(browser: Browser) -> None:
        async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
            other = Browser(session, browser.page, [])
            await other.enter()
            both: list[Any] = [one.text(path) for one in (browser, other) for path in ("/", JOB, f"{JOB}/logs")]
            await asyncio.gather(*both)
        assert sorted(jobs.asked) == ["all", "logs resnet50", "read resnet50"]

    browse(jobs, test)
