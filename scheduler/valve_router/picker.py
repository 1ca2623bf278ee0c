"""The endpoint picker as a process: ext-proc over gRPC for gateways, and the router's pages for its operator."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as service
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valve_kube.access import Access

from valve_router.checkups import ModelLooks
from valve_router.counts import Counts
from valve_router.exchange import Exchange, HeldBodies, NeverSaid
from valve_router.replicas import Replicas
from valve_router.server import END_S, Operators, known
from valve_router.settings import RouterSettings, is_loopback

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
STREAMS = 8192  # requests under way over all gateways; gRPC refuses more
OWN_DAYS = 3650


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayDoor:
    """Where gateways connect, and how."""

    host: str = "127.0.0.1"
    port: int = 9002
    certificate: Path | None = None
    key: Path | None = None
    client_authority: Path | None = None  # only gateways that it signed may connect
    is_self_signed: bool = False  # a certificate of its own, made at each start; gateways cannot check it
    health_port: int = 0  # health checks alone, without TLS: the kubelet's know none; 0: nowhere but at `port`
    is_open: bool = False  # without TLS to others than this machine: a network policy keeps the rest away

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("--tls-certificate needs --tls-key, and --tls-key needs --tls-certificate")
        if self.certificate and self.is_self_signed:
            raise ValueError("--tls-self-signed: not with --tls-certificate")
        if self.client_authority and not self.certificate:
            raise ValueError("--client-ca: only with --tls-certificate")
        if not (self.certificate or self.is_self_signed or self.is_open or is_loopback(self.host)):
            raise ValueError(
                f"--grpc {self.host}: others can connect there; set --tls-certificate and --tls-key or "
                "--tls-self-signed, or say --without-tls where a network policy lets only gateways in"
            )

    def credentials(self) -> grpc.ServerCredentials | None:
        if self.certificate and self.key:
            pair = (self.key.read_bytes(), self.certificate.read_bytes())
            authority = self.client_authority.read_bytes() if self.client_authority else None
            return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)
        return grpc.ssl_server_credentials([self_signed()]) if self.is_self_signed else None


class Picker(service.ExternalProcessorServicer):  # type: ignore[misc]
    def __init__(self, settings: RouterSettings, replicas: Replicas, counts: Counts, looks: ModelLooks) -> None:
        self._replicas, self._counts, self._looks = replicas, counts, looks
        self._held = HeldBodies(settings.held_bytes)
        self._settings = settings

    async def Process(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        exchange = Exchange(self._replicas, self._counts, self._held, time.monotonic)
        asked_until_s = time.monotonic() + self._settings.stuck_s
        try:
            while not exchange.is_refused:
                # All of a request has one limit, so that no sender of single bytes holds its place; of the answer each
                # pause has one, as the router's own proxy has it: an answer may be long.
                left_s = self._settings.silent_s if exchange.is_chosen else asked_until_s - time.monotonic()
                try:
                    message = await asyncio.wait_for(messages.__anext__(), max(0.0, left_s))
                except asyncio.TimeoutError:
                    for answer in exchange.late():
                        yield answer
                    return
                await exchange.look(message, self._looks)
                for answer in exchange.on(message):
                    yield answer
        except StopAsyncIteration:
            return
        except NeverSaid as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"out of order: {error}")
        finally:
            exchange.end()


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Ready as soon as it knows the replicas. Whether one answers is no matter: it says 503 itself."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in ("", "liveness", "readiness", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service}")
        is_well = request.service == "liveness" or self._replicas.is_told
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if is_well else status.NOT_SERVING)


async def serve(
    settings: RouterSettings,
    door: GatewayDoor,
    *,
    stop: asyncio.Event,
    ready: asyncio.Event | None = None,
    access: Access | None = None,
) -> None:
    """Until `stop`; requests under way may end."""
    async with known(settings, access) as (_, replicas, advice, looks):
        counts, app = Counts(), web.Application()
        Operators(settings, replicas, counts, advice).add_to(app)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        server = grpc.aio.server(maximum_concurrent_rpcs=STREAMS)
        service.add_ExternalProcessorServicer_to_server(Picker(settings, replicas, counts, looks), server)
        health_pb2_grpc.add_HealthServicer_to_server(Health(replicas), server)
        address, credentials = f"{bracketed(door.host)}:{door.port}", door.credentials()
        try:
            if credentials is None:
                server.add_insecure_port(address)
            else:
                server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"--grpc {address}: {error}") from error
        probed = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(Health(replicas), probed)
        if door.health_port:
            probed.add_insecure_port(f"{bracketed(door.host)}:{door.health_port}")
        await server.start()
        await probed.start()
        await runner.setup()
        try:
            await web.TCPSite(runner, settings.host, settings.port).start()
            if ready is not None:
                ready.set()
            await stop.wait()
        finally:
            await server.stop(END_S)
            await probed.stop(None)
            await runner.cleanup()


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def self_signed() -> tuple[bytes, bytes]:
    """A key and a certificate: no third party can read along, but a client cannot tell which server it reached."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "valve endpoint picker")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=OWN_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)
