"""Answers admission reviews, and renews the certificate that it answers with."""

import asyncio
import base64
import gc
import logging
import ssl
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import msgspec
from valve_kube import names
from valve_kube.client import MERGE_PATCH, ApiError, Json, KubeClient, Unreachable
from valve_kube.injection import Skipped

from valve_scheduler import metrics
from valve_scheduler.probes import Probes
from valve_scheduler.server import Answer, json_answer, serve_exchanges, text_answer
from valve_scheduler.webhook.admission import (
    AdmissionSettings,
    Pod,
    PodRefused,
    marked,
    mutate_offline,
    mutate_online,
)
from valve_scheduler.webhook.certificates import Material, expires_at, renew
from valve_scheduler.webhook.intake import COLLECT_AFTER, Intake
from valve_scheduler.webhook.jobs import spare_retries
from valve_scheduler.webhook.jsonpatch import diff

log = logging.getLogger(__name__)

_SECRET_KEYS = {"bundle": "ca.crt", "ca_key": "ca.key", "certificate": "tls.crt", "key": "tls.key"}


def review_offline(request: Json, settings: AdmissionSettings) -> Json:
    """Fail closed: an exception here becomes a 500, and the API server refuses the pod."""
    pod = request["object"]
    try:
        changed = mutate_offline(pod, settings)
    except PodRefused as refusal:
        metrics.admissions.labels("offline", "refused").inc()
        message = f"valve: {refusal}"
        return {"uid": request["uid"], "allowed": False, "status": {"code": 403, "message": message}}

    return _allowed("offline", request["uid"], pod, changed)


def review_online(request: Json, settings: AdmissionSettings) -> Json:
    """Fail open: after any failure the pod is allowed as it is."""
    pod = request["object"]
    try:
        changed = mutate_online(pod, settings)
    except Skipped as reason:
        metrics.admissions.labels("online", "skipped").inc()
        changed = marked(pod, f"skipped-{reason}")
    except Exception:
        log.exception("online pod left alone")
        metrics.admissions.labels("online", "skipped").inc()
        return {"uid": request.get("uid", ""), "allowed": True, "warnings": ["valve: not injected, internal error"]}

    return _allowed("online", request["uid"], pod, changed)


def review_job(request: Json, _: AdmissionSettings) -> Json:
    """Fail open: after any failure the Job is allowed as it is."""
    job = request["object"]
    try:
        changed, warning = spare_retries(job)
    except Exception:
        log.exception("job left alone")
        return {"uid": request.get("uid", ""), "allowed": True}
    answer = _allowed("job", request["uid"], job, changed)

    return answer | ({"warnings": [f"valve: {warning}"]} if warning else {})


def _allowed(role: str, uid: str, before: Pod, after: Pod) -> Json:
    operations = diff(before, after)
    metrics.admissions.labels(role, "changed" if operations else "unchanged").inc()
    answer: Json = {"uid": uid, "allowed": True}
    if operations:
        patch = base64.b64encode(msgspec.json.encode(operations)).decode()
        answer |= {"patchType": "JSONPatch", "patch": patch}

    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """Names of what the webhook owns in its namespace, and the hosts its certificate is for."""

    port: int = 8443
    host: str = "0.0.0.0"
    probe_host: str = "0.0.0.0"
    probe_port: int = 8902
    namespace: str = "valve-system"
    secret: str = "valve-webhook-tls"
    configuration: str = "valve"
    hosts: Sequence[str] = ("valve-webhook.valve-system.svc",)
    certificate_folder: Path | None = None  # mounted by cert-manager; None: self-managed
    refresh_s: float = 10.0
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)


class Webhook:
    """All replicas renew together: the Secret's resourceVersion lets one of them win each step."""

    def __init__(self, client: KubeClient, settings: WebhookSettings, now: Callable[[], datetime]) -> None:
        self._client = client
        self._settings = settings
        self._now = now
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
        self._served: tuple[bytes, bytes] = (b"", b"")
        self.intake = Intake(self.judge)

    async def run(self) -> None:
        """Until cancelled. Listens only once there is a certificate to show."""
        missing = Probes(lambda: [] if self._served[0] else ["certificate"])
        probes = await missing.serve(self._settings.probe_host, self._settings.probe_port)
        while not self._served[0]:
            await self.refresh()
            await asyncio.sleep(0 if self._served[0] else 0.5)
        server = await serve_exchanges(self.intake.exchange, self._settings.host, self._settings.port, self._tls)
        log.info("webhook listens", extra={"port": self._settings.port})
        try:
            while True:
                await asyncio.sleep(self._settings.refresh_s)
                await self.refresh()
        finally:
            server.close()
            probes.close()

    def judge(self, path: str, body: bytes) -> Answer:
        """For a large review this runs in a thread, so it reads nothing but the settings."""
        reviews = {"/mutate/offline": review_offline, "/mutate/online": review_online, "/mutate/job": review_job}
        if path not in reviews:
            return text_answer(f"no such call: POST {path}", 404)
        request = msgspec.json.decode(body)["request"]
        response = reviews[path](request, self._settings.admission)

        return json_answer({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response})

    async def refresh(self) -> None:
        """Read the certificate, renew what is due, publish the bundle; a failure leaves all as it was."""
        try:
            if self._settings.certificate_folder is not None:
                folder = self._settings.certificate_folder
                self._serve((folder / "tls.crt").read_bytes(), (folder / "tls.key").read_bytes())
            else:
                await self._renew()
        except (ApiError, Unreachable, OSError, ValueError) as error:
            log.warning("certificate not refreshed", extra={"error": str(error)})

    async def _renew(self) -> None:
        secret = await self._secret()
        material = _material(secret)
        configuration = await self._client.request("GET", f"{names.WEBHOOKS_PATH}/{self._settings.configuration}")
        trusted = _trusted(configuration)
        due = renew(material, trusted, self._settings.hosts, self._now())
        if due is not material:
            await self._keep(secret, due)
        if trusted != due.bundle:
            await self._publish(configuration, due.bundle)
        self._serve(due.certificate, due.key)

    async def _secret(self) -> Json | None:
        path = f"/api/v1/namespaces/{self._settings.namespace}/secrets/{self._settings.secret}"
        try:
            return await self._client.request("GET", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _keep(self, secret: Json | None, material: Material) -> None:
        data = {key: base64.b64encode(getattr(material, part)).decode() for part, key in _SECRET_KEYS.items()}
        collection = f"/api/v1/namespaces/{self._settings.namespace}/secrets"
        if secret is None:
            body = {"metadata": {"name": self._settings.secret}, "type": "kubernetes.io/tls", "data": data}
            await self._client.request("POST", collection, body=body)
            return
        await self._client.request("PUT", f"{collection}/{self._settings.secret}", body={**secret, "data": data})

    async def _publish(self, configuration: Json, bundle: bytes) -> None:
        text = base64.b64encode(bundle).decode()
        hooks = [
            {**hook, "clientConfig": {**hook["clientConfig"], "caBundle": text}} for hook in configuration["webhooks"]
        ]
        patch = {"metadata": {"resourceVersion": configuration["metadata"]["resourceVersion"]}, "webhooks": hooks}
        path = f"{names.WEBHOOKS_PATH}/{self._settings.configuration}"
        await self._client.request("PATCH", path, body=patch, content_type=MERGE_PATCH)
        log.info("authority published", extra={"webhooks": len(hooks)})

    def _serve(self, certificate: bytes, key: bytes) -> None:
        """New connections get the new certificate; open ones keep theirs."""
        if (certificate, key) == self._served:
            return
        with tempfile.TemporaryDirectory() as folder:  # ssl reads files only
            paths = Path(folder, "tls.crt"), Path(folder, "tls.key")
            for path, data in zip(paths, (certificate, key), strict=True):
                path.touch(mode=0o600)
                path.write_bytes(data)
            self._tls.load_cert_chain(*paths)
        self._served = (certificate, key)
        metrics.certificate_expiry.set(expires_at(certificate).timestamp())
        log.info("certificate served")


def _material(secret: Json | None) -> Material | None:
    data = (secret or {}).get("data") or {}
    if not all(data.get(key) for key in _SECRET_KEYS.values()):
        return None

    return Material(**{part: base64.b64decode(data[key]) for part, key in _SECRET_KEYS.items()})


def _trusted(configuration: Json) -> bytes:
    """The bundle that every entry of the configuration has; empty while they differ."""
    bundles = {hook["clientConfig"].get("caBundle") or "" for hook in configuration.get("webhooks") or []}

    return base64.b64decode(bundles.pop()) if len(bundles) == 1 else b""


async def run_webhook(client: KubeClient, settings: WebhookSettings) -> None:
    gc.set_threshold(COLLECT_AFTER)
    await Webhook(client, settings, lambda: datetime.now(timezone.utc)).run()
