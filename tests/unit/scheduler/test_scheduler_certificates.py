"""The webhook's certificates: real TLS with what was made, and no moment at which the API server would refuse it."""

import asyncio
import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from valve_kube.access import Access
from valve_kube.client import KubeClient
from valve_scheduler import metrics
from valve_scheduler.server import Answer, serve, text_answer
from valve_scheduler.webhook.certificates import CA_LIFE, LEAF_LIFE, Material, expires_at, renew
from valve_scheduler.webhook.service import Webhook, WebhookSettings

START = datetime.now(timezone.utc).replace(microsecond=0)
HOSTS = ("valve-webhook.valve-system.svc", "127.0.0.1")


def handshake(folder: Path, trusted: bytes, material: Material, host: str = HOSTS[0]) -> None:
    """Connect as the API server does; raises ssl.SSLError where it would refuse."""
    (folder / "tls.crt").write_bytes(material.certificate)
    (folder / "tls.key").write_bytes(material.key)
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_tls.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    client_tls = ssl.create_default_context(cadata=trusted.decode())

    async def handler(method: str, path: str, body: bytes) -> Answer:
        return text_answer("ok")

    async def run() -> None:
        server = await serve(handler, "127.0.0.1", 0, server_tls)
        port = server.sockets[0].getsockname()[1]
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_tls, server_hostname=host)
            writer.close()
        finally:
            server.close()

    asyncio.run(run())


def first() -> Material:
    return renew(None, b"", HOSTS, START)


@pytest.mark.parametrize("host", HOSTS)
def test_a_new_certificate_is_accepted_under_each_of_its_hosts(tmp_path: Path, host: str) -> None:
    material = first()

    handshake(tmp_path, material.bundle, material, host)


def test_a_host_that_is_not_in_it_is_refused(tmp_path: Path) -> None:
    material = first()

    with pytest.raises(ssl.SSLError):
        handshake(tmp_path, material.bundle, material, "other.svc")


def test_nothing_changes_before_two_thirds_of_its_life() -> None:
    material = first()

    assert renew(material, material.bundle, HOSTS, START + LEAF_LIFE * 0.66) is material


def test_a_certificate_is_renewed_under_the_same_authority(tmp_path: Path) -> None:
    material = first()

    renewed = renew(material, material.bundle, HOSTS, START + LEAF_LIFE * 0.67)

    assert renewed.bundle == material.bundle
    assert expires_at(renewed.certificate) > expires_at(material.certificate)


def test_other_hosts_lead_to_another_certificate(tmp_path: Path) -> None:
    material = first()

    renewed = renew(material, material.bundle, ("renamed.svc",), START)

    handshake(tmp_path, material.bundle, renewed, "renamed.svc")


def test_a_new_authority_is_trusted_everywhere_before_it_signs(tmp_path: Path) -> None:
    """Walk through a change of authority: at each step old and new bundle accept what is served."""
    born = START - CA_LIFE * 0.67  # so that today is the day it is due
    oldest = renew(None, b"", HOSTS, born)
    material = renew(oldest, oldest.bundle, HOSTS, born + CA_LIFE * 0.665)

    announced = renew(material, material.bundle, HOSTS, START)
    assert announced.certificate == material.certificate
    assert announced.bundle.endswith(material.bundle)
    handshake(tmp_path, announced.bundle, announced)

    waiting = renew(announced, material.bundle, HOSTS, START)  # the API server does not know it yet
    assert waiting is announced

    switched = renew(announced, announced.bundle, HOSTS, START)
    assert switched.certificate != announced.certificate
    handshake(tmp_path, announced.bundle, switched)
    with pytest.raises(ssl.SSLError):
        handshake(tmp_path, material.bundle, switched)


def test_the_end_of_a_mounted_certificate_is_told_too(tmp_path: Path) -> None:
    """cert-manager renews it; the alert has to see when that fails."""
    material = first()
    for name, data in (("tls.crt", material.certificate), ("tls.key", material.key)):
        (tmp_path / name).write_bytes(data)
    client = KubeClient(Access(host="127.0.0.1", port=1, tls=None, authorization=str))
    metrics.certificate_expiry.set(0)

    asyncio.run(Webhook(client, WebhookSettings(certificate_folder=tmp_path), lambda: START).refresh())

    told = metrics.REGISTRY.get_sample_value("valve_webhook_certificate_expiry_timestamp_seconds")
    assert told == expires_at(material.certificate).timestamp()


def test_an_authority_that_ended_leaves_the_bundle() -> None:
    material = first()
    second = renew(material, material.bundle, HOSTS, START + CA_LIFE + timedelta(days=1))

    assert material.bundle not in second.bundle


def test_a_bundle_that_cannot_be_read_is_as_good_as_none() -> None:
    material = first()

    assert renew(material, b"garbage", HOSTS, START + LEAF_LIFE * 0.7) is material


def test_a_namespace_of_any_length_never_leaves_the_webhook_without_a_certificate(tmp_path: Path) -> None:
    """Beyond 46 characters it never had one, and every offline pod was refused."""
    host = f"valve-webhook.{'n' * 63}.svc"
    material = renew(None, b"", (host,), START)

    handshake(tmp_path, material.bundle, material, host)
