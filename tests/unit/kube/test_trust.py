"""The endpoint's identity over time: what a replica serves and hands out after it has stood by for long."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Callable
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from regroup_operator.api import RegroupError
from regroup_operator.endpoint.certificates import Authority
from regroup_operator.kube.client import ApiUnavailable, Client
from regroup_operator.settings import OperatorSettings
from regroup_operator.trust import Trust

DAY_S = 86400.0


class Api:
    """The API server with one Secret; away for the first `num_failures` reads."""

    def __init__(self, secret: dict[str, bytes]) -> None:
        self.secret = secret
        self.num_failures = 0

    async def get(self, *_: Any) -> dict[str, Any]:
        if self.num_failures:
            self.num_failures -= 1
            raise ApiUnavailable(0, "Transport", "No answer.")
        return {"data": {key: base64.b64encode(value).decode() for key, value in self.secret.items()}}


def of(authority: Authority, old: Authority | None = None) -> dict[str, bytes]:
    return {"ca.crt": authority.ca_pem, "ca.key": authority.key_pem} | ({"old-ca.crt": old.ca_pem} if old else {})


def trust_of(api: Api, clock: Callable[[], float]) -> Trust:
    return Trust(cast("Client", api), OperatorSettings(), clock=clock)


def served(context: ssl.SSLContext, bundle: str) -> bytes | None:
    """Return the certificate that a client with this bundle accepts now, None if it accepts none; no network."""
    client = ssl.create_default_context(cadata=bundle)
    to_server, to_client, to_server_2, to_client_2 = (ssl.MemoryBIO() for _ in range(4))
    ours = client.wrap_bio(to_client, to_server, server_hostname="regroup.regroup-system.svc")
    theirs = context.wrap_bio(to_server_2, to_client_2, server_side=True)
    for _ in range(10):
        for side in (ours, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return None
            to_server_2.write(to_server.read())
            to_client.write(to_client_2.read())
    return ours.getpeercert(binary_form=True)


def test_certificate_of_a_replica_that_stood_by_for_long_is_renewed_when_its_term_begins() -> None:
    now_s = [1000.0]
    authority = Authority.create()
    trust = trust_of(Api(of(authority)), lambda: now_s[0])
    asyncio.run(trust.load())
    first = served(trust.context, trust.ca_bundle())
    assert first is not None
    now_s[0] += DAY_S
    asyncio.run(trust.load())
    assert served(trust.context, trust.ca_bundle()) == first, "not before it is due"
    now_s[0] += 7 * DAY_S
    asyncio.run(trust.load())
    assert served(trust.context, trust.ca_bundle()) not in (first, None)


def test_ca_that_changed_meanwhile_is_served_and_handed_out_once_the_api_server_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("regroup_operator.trust.RETRY_S", 0.0)
    old, new = Authority.create(), Authority.create()
    api = Api(of(old))
    trust = trust_of(api, lambda: 1000.0)
    asyncio.run(trust.load())
    api.secret, api.num_failures = of(new, old), 3
    asyncio.run(trust.load())
    assert trust.ca_bundle() == (new.ca_pem + old.ca_pem).decode()
    assert served(trust.context, new.ca_pem.decode()) is not None
    assert served(trust.context, old.ca_pem.decode()) is None


def test_standby_follows_the_secret_and_survives_one_that_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regroup_operator.trust.LOOK_S", 0.0)
    old, new = Authority.create(), Authority.create()
    api = Api(of(old))
    trust = trust_of(api, lambda: 1000.0)

    async def scenario() -> None:
        await trust.load()
        locked = load_pem_private_key(new.key_pem, None).private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
        )
        for api.secret in ({**of(new), "ca.key": locked}, {"ca.crt": b"nothing"}):
            with pytest.raises(RegroupError, match="holds no usable CA"):
                await trust.load()
        following = asyncio.create_task(trust.run())
        await asyncio.sleep(0)
        api.secret = of(new)
        async with asyncio.timeout(5):
            while trust.ca_bundle() != new.ca_pem.decode():
                await asyncio.sleep(0)
        following.cancel()

    asyncio.run(scenario())
    assert served(trust.context, new.ca_pem.decode()) is not None


@pytest.mark.parametrize(
    ("new_end", "old_end"),
    [
        pytest.param(b"", b"\n", id="the new one has no final newline"),
        pytest.param(b"\n", b"", id="the former one has none"),
        pytest.param(b"\n\xa7 not UTF-8\n", b"\r\n", id="a comment, and the newlines of Windows"),
    ],
)
def test_bundle_can_be_loaded_however_its_parts_were_written(new_end: bytes, old_end: bytes) -> None:
    old, new = Authority.create(), Authority.create()
    secret = of(new, old)
    secret["ca.crt"] = new.ca_pem.rstrip() + new_end
    secret["old-ca.crt"] = old.ca_pem.rstrip() + old_end
    trust = trust_of(Api(secret), lambda: 1000.0)
    asyncio.run(trust.load())
    assert trust.ca_bundle() == (new.ca_pem + old.ca_pem).decode()
    assert served(trust.context, trust.ca_bundle()) is not None


def test_former_ca_that_was_emptied_is_none(caplog: pytest.LogCaptureFixture) -> None:
    new = Authority.create()
    trust = trust_of(Api({**of(new), "old-ca.crt": b"\n"}), lambda: 1000.0)
    asyncio.run(trust.load())
    assert (trust.ca_bundle(), caplog.messages) == (new.ca_pem.decode(), [])


NO_FORMER = (
    "Secret regroup-system/regroup-ca holds no certificate in old-ca.crt. "
    "Remove that key, or write the former ca.crt there."
)


@pytest.mark.parametrize("garbage", [b"\xff\xfe", b"nothing"])
def test_former_ca_that_is_no_certificate_is_left_out_at_the_start(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    new = Authority.create()
    trust = trust_of(Api({**of(new), "old-ca.crt": garbage}), lambda: 1000.0)
    asyncio.run(trust.load())
    assert trust.ca_bundle() == new.ca_pem.decode()
    assert served(trust.context, trust.ca_bundle()) is not None
    assert caplog.messages == [f"The former CA is not trusted: {NO_FORMER}"]


def test_former_ca_that_is_no_certificate_changes_nothing_until_the_certificate_is_due(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Agents that trust the former CA alone go on meanwhile; a certificate that ran out would be of use to nobody."""
    now_s = [1000.0]
    old, new = Authority.create(), Authority.create()
    api = Api(of(old))
    trust = trust_of(api, lambda: now_s[0])
    asyncio.run(trust.load())
    api.secret = {**of(new), "old-ca.crt": b"\xff\xfe"}
    with pytest.raises(RegroupError) as caught:
        asyncio.run(trust._refresh())
    assert str(caught.value) == NO_FORMER
    asyncio.run(trust.load())
    assert caplog.messages == [f"The trusted CAs stay as they were: {NO_FORMER}"], "a term begins all the same"
    assert trust.ca_bundle() == old.ca_pem.decode()
    assert served(trust.context, old.ca_pem.decode()) is not None
    now_s[0] += 3 * DAY_S
    asyncio.run(trust.load())
    assert trust.ca_bundle() == new.ca_pem.decode()
    assert served(trust.context, new.ca_pem.decode()) is not None
    api.secret = of(new, old)
    asyncio.run(trust.load())
    assert trust.ca_bundle() == (new.ca_pem + old.ca_pem).decode()
