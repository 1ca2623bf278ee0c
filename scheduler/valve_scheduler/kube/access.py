"""Where the API server is and how to prove who we are."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """`authorization` is asked for each request: a service account's token is replaced every hour."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    authorization: Callable[[], str]


def in_cluster(environment: dict[str, str], account: Path = SERVICE_ACCOUNT) -> Access:
    return Access(
        host=environment["KUBERNETES_SERVICE_HOST"],
        port=int(environment["KUBERNETES_SERVICE_PORT"]),
        tls=ssl.create_default_context(cafile=str(account / "ca.crt")),
        authorization=lambda: "Bearer " + (account / "token").read_text().strip(),
    )


def from_kubeconfig(path: str | None = None, context: str | None = None) -> Access:
    """The official client's reader, so that exec plugins and cloud logins work for people too."""
    from kubernetes import client, config  # costs 46 MB: only outside a cluster

    settings = client.Configuration()
    config.load_kube_config(config_file=path, context=context, client_configuration=settings)
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
        # Asked anew each time: the client refreshes tokens of exec plugins in here.
        authorization=lambda: settings.auth_settings().get("BearerToken", {}).get("value") or "",
    )


def find(environment: dict[str, str], kubeconfig: str | None = None) -> Access:
    """A named kubeconfig, else the pod's service account, else the user's kubeconfig."""
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in environment:
        return in_cluster(environment)

    return from_kubeconfig(kubeconfig)
