"""Where the API server is, and with which credentials it is called."""

import contextlib
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from valve_kube.errors import SchedulerError

# The client's reader builds its whole configuration anew for each question; it renews tokens well before their end.
_ASK_EVERY_S = 10.0
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class NoAccess(SchedulerError):
    """The kubeconfig does not say how to reach an API server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """`authorization` is asked for each request: a service account's token is replaced every hour."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    authorization: Callable[[], str]
    namespace: str = "default"  # of the caller, where a command names none
    renew: Callable[[], None] = lambda: None  # called before each connection: takes up what `tls` should trust by now


def in_cluster(environment: dict[str, str], account: Path = SERVICE_ACCOUNT) -> Access:
    authorities = _Authorities(account / "ca.crt")
    return Access(
        host=environment["KUBERNETES_SERVICE_HOST"],
        port=int(environment["KUBERNETES_SERVICE_PORT"]),
        tls=authorities.tls,
        renew=authorities.renew,
        authorization=lambda: "Bearer " + (account / "token").read_text().strip(),
        namespace=(account / "namespace").read_text().strip(),
    )


class _Authorities:
    """Whom a pod trusts. The file is replaced when the cluster's authority is: a process that read it only at its
    start would lose the API server for good, and stay ready. What was trusted before is trusted until the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = self._version()
        self.tls = ssl.create_default_context(cafile=str(path))

    def _version(self) -> tuple[int, int]:
        now = self._path.stat()
        return now.st_ino, now.st_mtime_ns

    def renew(self) -> None:
        """A file that is away or half-written is read before the next connection."""
        with contextlib.suppress(OSError):  # ssl.SSLError is one
            if (version := self._version()) != self._read:
                self.tls.load_verify_locations(cafile=str(self._path))
                self._read = version


def from_kubeconfig(path: str | None = None, context: str | None = None) -> Access:
    """The official client's reader, so that exec plugins and cloud logins work for people too."""
    from kubernetes import client, config  # costs 46 MB: only outside a cluster

    settings = client.Configuration()
    try:
        config.load_kube_config(config_file=path, context=context, client_configuration=settings)
        contexts, active = config.list_kube_config_contexts(config_file=path)
    except config.ConfigException as error:
        raise NoAccess(f"kubeconfig: {error} KUBECONFIG=FILE names one.") from error
    chosen = next((one for one in contexts if one["name"] == context), active)
    url = urlsplit(settings.host)
    tls = None
    if url.scheme == "https":
        tls = ssl.create_default_context(cafile=settings.ssl_ca_cert)
        if not settings.verify_ssl:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
        if settings.cert_file:
            tls.load_cert_chain(settings.cert_file, settings.key_file)

    return Access(
        host=url.hostname or "localhost",
        port=url.port or (443 if tls else 80),
        tls=tls,
        # Asked again and again: the client refreshes tokens of exec plugins in here.
        authorization=_remembered(lambda: settings.auth_settings().get("BearerToken", {}).get("value") or ""),
        namespace=chosen["context"].get("namespace") or "default",
    )


def _remembered(ask: Callable[[], str]) -> Callable[[], str]:
    """The answer of the last seconds."""
    known, until_s = "", float("-inf")

    def answer() -> str:
        nonlocal known, until_s
        if time.monotonic() >= until_s:
            known, until_s = ask(), time.monotonic() + _ASK_EVERY_S
        return known

    return answer


def find(environment: dict[str, str], kubeconfig: str | None = None, context: str | None = None) -> Access:
    """A named kubeconfig or context, else the pod's service account, else the user's kubeconfig."""
    if kubeconfig is None and context is None and "KUBERNETES_SERVICE_HOST" in environment:
        return in_cluster(environment)

    return from_kubeconfig(kubeconfig, context)
