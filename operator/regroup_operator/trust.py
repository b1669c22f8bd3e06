"""The endpoint's identity in a cluster: a CA in a Secret, and a serving key for some days. Both change without a restart.

The Secret of the operator's namespace holds ca.crt and ca.key. To change the CA, an administrator moves ca.crt to
old-ca.crt and writes a new pair. Within minutes agents trust both, and every operator serves a certificate of the new
one.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable

from regroup_operator.api import RegroupError
from regroup_operator.endpoint.certificates import Authority, certificates, reload, server_context
from regroup_operator.kube.client import ApiError, Client
from regroup_operator.kube.lease import boot_clock
from regroup_operator.kube.secret import load_or_create
from regroup_operator.settings import OperatorSettings

log = logging.getLogger(__name__)

LOOK_S = 300.0
RETRY_S = 2.0


class _FormerCAError(RegroupError):
    """The former CA cannot be read. The trusted CAs and the served certificate stay as they are."""


class Trust:
    """The CA and the serving certificate. `load()` reads them first; `run()` keeps them current, also in a standby.

    A replica that begins to lead calls `load()` again, since a standby's copy may be LOOK_S old.
    """

    def __init__(self, client: Client, settings: OperatorSettings, *, clock: Callable[[], float] = boot_clock) -> None:
        self._client = client
        self._settings = settings
        self._clock = clock
        self._seen: dict[str, bytes] = {}
        self._bundle = ""
        self._issued_s = 0.0
        self._context: ssl.SSLContext | None = None
        self._reading = asyncio.Lock()

    @property
    def context(self) -> ssl.SSLContext:
        """The server's TLS context; new connections get the newest certificate."""
        assert self._context is not None, "load() comes first"
        return self._context

    def ca_bundle(self) -> str:
        """Return the CA certificates to trust, the newest first, as PEM."""
        assert self._bundle, "load() comes first"
        return self._bundle

    async def load(self) -> None:
        """Read or make the CA, and issue a certificate if it is due. Waits while the API server is away.

        Raises RegroupError if the Secret has no usable CA. A former CA that cannot be read is only logged.
        """
        while True:
            try:
                await self._refresh()
                return
            except _FormerCAError as error:
                log.warning("The trusted CAs stay as they were: %s", error)
                return
            except ApiError as error:
                log.warning("The CA's Secret could not be read: %s", error)
            await asyncio.sleep(RETRY_S)

    async def run(self) -> None:
        """Follow the Secret and renew the certificate until cancelled. After a failure the old ones stay."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._refresh()
            except RegroupError as error:
                log.warning("The certificate was not renewed: %s", error)

    async def _refresh(self) -> None:
        async with self._reading:  # an answer that came late must not replace a newer one
            data = await load_or_create(
                self._client, self._settings.namespace, self._settings.ca_secret_name, _new_authority
            )
            self._take(data)

    def _take(self, data: dict[str, bytes]) -> None:
        settings = self._settings
        due = self._context is None or self._clock() >= self._issued_s + settings.certificate_days * 86400 / 3
        if data == self._seen and not due:
            return
        secret = f"Secret {settings.namespace}/{settings.ca_secret_name}"
        try:
            authority = Authority.load(data["ca.crt"], data["ca.key"])
            trusted = certificates(data["ca.crt"])
        except (KeyError, ValueError, TypeError) as error:  # TypeError: the key is encrypted
            raise RegroupError(
                f"{secret} holds no usable CA in ca.crt and ca.key ({error}). "
                "Delete it; the operator then creates a new one."
            ) from None
        try:
            former = data.get("old-ca.crt", b"").strip()
            trusted += certificates(former) if former else []
        except ValueError:
            why = f"{secret} holds no certificate in old-ca.crt. Remove that key, or write the former ca.crt there."
            # Agents that trust the former CA alone are served by it as long as its certificate lasts.
            if not due:
                raise _FormerCAError(why) from None
            log.warning("The former CA is not trusted: %s", why)
        service = f"{settings.service_name}.{settings.namespace}"
        certificate, key = authority.issue(
            [f"{service}.svc", f"{service}.svc.cluster.local", service], days=settings.certificate_days
        )
        if self._context is None:
            self._context = server_context(certificate, key)
        else:
            reload(self._context, certificate, key)
        self._seen, self._bundle, self._issued_s = data, "".join(trusted), self._clock()


def _new_authority() -> dict[str, bytes]:
    authority = Authority.create()
    return {"ca.crt": authority.ca_pem, "ca.key": authority.key_pem}
