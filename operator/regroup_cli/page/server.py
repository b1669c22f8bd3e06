"""Answer the requests of browsers: pages, and the pieces of them that htmx refreshes. GET only.

A piece carries a digest of its content in the address that htmx asks next. If nothing has changed, the answer is 204 and the
browser leaves the page alone. So selections, focus and scrolling stay, and screen readers are not disturbed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from aiohttp import web
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from regroup_cli.page import guard, shown, sources
from regroup_cli.page.cache import Cache, Kept
from regroup_cli.page.sources import Key, Source
from regroup_client.log_lines import stamp_of
from regroup_client.views import JobView

ADDRESS = "127.0.0.1"
HERE = Path(__file__).parent
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_SEARCH = 200
"""Characters of a text that is searched for."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Page:
    """The page of one source on one port."""

    def __init__(self, source: Source, port: int, say: Callable[[str], None] = lambda _: None) -> None:
        """`say` gets sentences for the terminal: a new address after the one before was used."""
        self._source, self._port, self._say = source, port, say
        self.guard = guard.Guard()
        self.cache = Cache()
        self._hosts = guard.hosts(port)
        self._templates = Environment(
            loader=FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=lambda value: (
                value if isinstance(value, Markup) or not isinstance(value, str) else shown.harmless(value)
            ),
        )
        self._templates.globals |= {
            "shown": shown,
            "source": source,
            "stamp_of": stamp_of,
            "root": self.guard.root,
            "address_of": lambda view: self._path(source.key(view)),
        }

    def address(self, path: str = "/") -> str:
        """Return the address that opens the page once. `path`: without the secret at its begin."""
        return f"http://{ADDRESS}:{self._port}{self.guard.root}{path}?code={self.guard.code}"

    def _path(self, key: Key) -> str:
        return self.guard.root + path_of(key)

    def app(self) -> web.Application:
        """Return the application."""

        @web.middleware
        async def guarded(request: web.Request, handler: _Handler) -> web.StreamResponse:
            return await self._guarded(request, handler)

        app = web.Application(middlewares=[guarded])
        app.on_response_prepare.append(_add_headers)
        app.on_cleanup.append(self._close)
        routes: dict[str, _Handler] = {
            "/": self._jobs,
            "/piece": partial(self._jobs, is_piece=True),
            "/jobs/{place}/{name}": self._job,
            "/jobs/{place}/{name}/piece": partial(self._job, is_piece=True),
            "/jobs/{place}/{name}/logs": self._logs,
            "/jobs/{place}/{name}/logs/piece": partial(self._logs, is_piece=True),
        }
        app.router.add_get("/static/{name}", self._static, allow_head=False)
        for path, handler in routes.items():
            app.router.add_get(self.guard.root + path, handler, allow_head=False)
        return app

    async def _close(self, app: web.Application) -> None:  # noqa: ARG002 (a callback's parameter)
        self.cache.close()

    async def _guarded(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuse who may not read the page, let in who has the code, and show errors as pages."""
        if request.headers.get("Host") not in self._hosts:
            ports = f"ssh -L {self._port}:{ADDRESS}:{self._port} HOST"
            return self._refusal(
                403, f"The page has another address. With ssh, use the same port on both sides: {ports}."
            )
        try:
            if request.path.startswith("/static/"):
                return await handler(request)
            if request.method != "GET":
                raise web.HTTPMethodNotAllowed(request.method, ["GET"])
            is_below_root = self.guard.is_below_root(request.path)
            if is_below_root and self.guard.knows(request.cookies.get(guard.COOKIE, "")):
                return await handler(request)
            if is_below_root and "code" in request.query:
                return self._let_in(request)
            return self._refusal(
                403,
                "Open the page with the newest address that the command has printed. Each address works once, in one browser.",
            )
        except web.HTTPException as error:
            texts = {404: "There is no such page.", 405: "The page is only read: it answers GET."}
            return self._refusal(error.status, texts.get(error.status, error.reason))
        except Exception as error:
            return self._refusal(500, f"The page cannot show this ({type(error).__name__}).")

    def _let_in(self, request: web.Request) -> web.Response:
        """Turn the code of an address into a cookie.

        The answer is a page that goes on by itself, and no redirect. A browser sends no strict cookie along redirects that
        began on another site, such as a web mail.
        """
        cookie = self.guard.redeem(request.query["code"])
        if cookie is None:
            return self._refusal(
                403, "This address was used already. Open the newest one that the command has printed."
            )
        with contextlib.suppress(OSError):  # nobody reads the terminal any more
            self._say(f"for another browser: {self.address()}")
        answer = self._page("enter.html", to=request.rel_url.with_query(None).raw_path)
        answer.set_cookie(
            guard.COOKIE, cookie, httponly=True, samesite="Strict", path=f"{self.guard.root}/", max_age=None
        )
        return answer

    async def _jobs(self, request: web.Request, *, is_piece: bool = False) -> web.Response:
        kept = await self.cache.get("jobs", self._source.all)
        text = request.query.get("text", "")[:MAX_SEARCH]
        chosen = shown.choose(kept.value or (), text, _number(request.query.get("page", "")))
        return self._answer(
            request, "jobs", kept, is_piece, {"text": text, "page": str(chosen.page)}, chosen=chosen, text=text
        )

    async def _job(self, request: web.Request, *, is_piece: bool = False) -> web.Response:
        key = _key(request)
        kept = await self._seen(key)
        return self._answer(request, "job", kept, is_piece, {}, view=kept.value, key=key, address=self._path(key))

    async def _logs(self, request: web.Request, *, is_piece: bool = False) -> web.Response:
        key = _key(request)
        seen = await self._seen(key)
        view: JobView | None = seen.value
        choice = shown.log_choice(request.query.get("of", ""), request.query.get("text", "")[:MAX_SEARCH], view)
        kept = seen
        if not seen.is_refused:
            read = partial(sources.tail, self._source, key, choice.slot)
            kept = await self.cache.get(("logs", key, choice.slot), read, is_long=True)
        query = {"of": choice.of, "text": choice.text}
        tail: sources.Tail = (kept.value if kept is not seen else None) or sources.Tail([])
        lines = shown.log_lines(tail.lines, choice)
        return self._answer(
            request,
            "logs",
            kept,
            is_piece,
            query,
            view=view,
            key=key,
            address=self._path(key),
            choice=choice,
            lines=lines,
            late=tail.late,
        )

    async def _seen(self, key: Key) -> Kept:
        return await self.cache.get(("job", key), partial(sources.look, self._source, key))

    def _answer(
        self, request: web.Request, name: str, kept: Kept, is_piece: bool, query: dict[str, str], **given: Any
    ) -> web.Response:
        """Return a page, or only its piece. `query`: what the piece is asked with again."""
        piece = self._templates.get_template(f"{name}_piece.html").render(kept=kept, **given)
        trouble = self._templates.get_template("trouble.html").render(kept=kept)
        digest = hashlib.sha256(f"{piece}{trouble}".encode()).hexdigest()[:16]
        if is_piece and request.query.get("have") == digest:
            return web.Response(status=204)
        path = request.rel_url.raw_path.removesuffix("/piece").removesuffix("/")
        again = f"{path}/piece?{urlencode({**query, 'have': digest})}"
        values = {"kept": kept, "piece": Markup(piece), "again": again, "here": name, **given}
        if is_piece:
            return self._page("refreshed.html", **values)
        return self._page(f"{name}.html", 404 if kept.is_refused else 200, **values)

    def _refusal(self, status: int, text: str) -> web.Response:
        return self._page("refused.html", status, text=text)

    def _page(self, template: str, status: int = 200, **values: Any) -> web.Response:
        text = self._templates.get_template(template).render(**values)
        return web.Response(text=text, status=status, content_type="text/html")

    async def _static(self, request: web.Request) -> web.Response:
        path = HERE / "static" / Path(request.match_info["name"]).name
        if path.suffix not in TYPES or not path.is_file():
            raise web.HTTPNotFound
        return web.Response(text=path.read_text(), content_type=TYPES[path.suffix])


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:  # noqa: ARG001 (a signal's parameters)
    response.headers.update(guard.HEADERS)
    response.headers.pop("Server", None)


def _key(request: web.Request) -> Key:
    return Key(request.match_info["place"], request.match_info["name"])


def _number(text: str) -> int:
    """Return the number of a page of the list; 1 for a text that is none."""
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) else 1


def path_of(key: Key) -> str:
    """Return the path of a job on the page, without the secret at its begin."""
    return f"/jobs/{quote(key.place, safe='')}/{quote(key.name, safe='')}"


class Serving:
    """A page that is served in the running event loop, until `close`."""

    def __init__(self, page: Page, runner: web.AppRunner) -> None:
        self.page, self._runner = page, runner

    async def close(self) -> None:
        """End the page."""
        await self._runner.cleanup()


async def serve(source: Source, port: int, say: Callable[[str], None]) -> Serving:
    """Serve the page on loopback. `port` 0: a free one. Raises OSError if the port is in use."""
    listening = socket.create_server((ADDRESS, port))
    page = Page(source, listening.getsockname()[1], say)
    # Whatever another user sends to the port must not write to the terminal.
    quiet = logging.getLogger("regroup.page")
    quiet.disabled = True
    runner = web.AppRunner(page.app(), access_log=None, logger=quiet, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listening).start()
    return Serving(page, runner)
