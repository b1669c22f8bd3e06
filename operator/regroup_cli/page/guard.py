"""Decide who may read the page. Pure, but for the random codes.

The page is served on loopback, where every user of the machine and every site in the user's browser can reach it. Three things keep
them out. A code that works once, and is known only to the terminal, becomes a cookie. The Host header must be one of ours, so a
foreign name that resolves to 127.0.0.1 is refused. And no site may embed the page or send its cookie.

Browsers send a cookie to every port of a host, so also to a server of another user. All paths therefore begin with a secret, and
the cookie is sent below it only. A refusal must not show it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Callable

COOKIE = "regroup"
MAX_SESSIONS = 16
"""Browsers that are let in at once. The oldest one has to use a new code then."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every answer. Pages may quote logs, so no cache may keep them, and nothing in them may run."""


def hosts(port: int) -> frozenset[str]:
    """Return the values of the Host header that are answered."""
    names = ("127.0.0.1", "localhost", "[::1]")
    bare = names if port == 80 else ()  # browsers leave the port of HTTP out
    return frozenset((*bare, *(f"{name}:{port}" for name in names)))


class Guard:
    """Knows the code that is valid now, and the browsers that were let in."""

    def __init__(self, make: Callable[[], str] = lambda: secrets.token_urlsafe(24)) -> None:
        """`make` returns a new random text."""
        self._make = make
        self.root = f"/{make()}"
        """Begin of the paths that need the cookie, without a slash at its end."""
        self.code = make()
        """It opens the page once; after that there is another one."""
        self._sessions: deque[bytes] = deque(maxlen=MAX_SESSIONS)

    def is_below_root(self, path: str) -> bool:
        """Return whether a path begins with the secret."""
        return hmac.compare_digest(_digest("/".join(path.split("/", 2)[:2])), _digest(self.root))

    def redeem(self, code: str) -> str | None:
        """Return the cookie for a code, and make a new code; None for a wrong code."""
        if not hmac.compare_digest(_digest(code), _digest(self.code)):
            return None
        self.code = self._make()
        cookie = self._make()
        self._sessions.append(_digest(cookie))
        return cookie

    def knows(self, cookie: str) -> bool:
        """Return whether a browser with this cookie was let in."""
        given = _digest(cookie)
        return any(hmac.compare_digest(given, one) for one in self._sessions)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()
