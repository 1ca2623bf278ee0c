"""Kueue's own manager beside a control plane, as one process, with its webhooks for what the tests make."""

import base64
import json
import urllib.request
from typing import Any

from valve_tools.cluster.controlplane import ControlPlane, free_port, wait_for

NAME = "kueue"
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1"
GROUP = "kueue.x-k8s.io"
_OURS = ((GROUP, "v1beta2", "clusterqueue"), (GROUP, "v1beta2", "resourceflavor"), (GROUP, "v1beta2", "workload"))
_JOB = ("batch", "v1", "job")
HOOKS = {
    "mutate": ("MutatingWebhookConfiguration", ["CREATE"], (*_OURS, _JOB)),
    "validate": ("ValidatingWebhookConfiguration", ["CREATE", "UPDATE"], (*_OURS, _JOB, (GROUP, "v1beta2", "cohort"))),
}
"""As its own manifests register them, less the kinds that no test has."""
# It looks for the certificate of its metrics at a fixed place: an /etc of its own has it.
_START = """set -e
mount -t tmpfs none /etc
mkdir -p /etc/kueue/metrics/certs
cp "$1" /etc/kueue/metrics/certs/tls.crt
cp "$2" /etc/kueue/metrics/certs/tls.key
shift 2
exec "$@"
"""


def start_kueue(plane: ControlPlane) -> None:
    """Runs until it is killed by its name."""
    health, hooks = free_port(), free_port()
    config = plane.folder / "kueue.json"
    certificates = plane.folder / "apiserver"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "config.kueue.x-k8s.io/v1beta2",
                "kind": "Configuration",
                "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
                "metrics": {"bindAddress": "0"},
                "webhook": {"port": hooks, "host": "127.0.0.1", "certDir": "/etc/kueue/metrics/certs"},
                "leaderElection": {"leaderElect": False},
                "internalCertManagement": {"enable": False},
                "integrations": {"frameworks": ["batch/job"]},
            }
        )
    )
    plane.spawn(
        NAME,
        *("--mount", "sh", "-c", _START, NAME),
        *(str(certificates / f"apiserver.{kind}") for kind in ("crt", "key")),
        str(plane.programs / "kueue"),
        f"--config={config}",
        f"--kubeconfig={plane.kubeconfig}",
        "--feature-gates=VisibilityOnDemand=false",
        program="unshare",
    )
    wait_for("Kueue", lambda: urllib.request.urlopen(f"http://127.0.0.1:{health}/readyz"), 240)
    bundle = base64.b64encode((certificates / "apiserver.crt").read_bytes()).decode()
    for verb, (kind, operations, resources) in HOOKS.items():
        webhooks = [_hook(verb, operations, one, hooks, bundle) for one in resources]
        body = {"kind": kind, "metadata": {"name": NAME}, "webhooks": webhooks}
        plane.api.post(f"{CONFIGURATIONS}/{kind.lower()}s", {"apiVersion": "admissionregistration.k8s.io/v1", **body})


def stop_kueue(plane: ControlPlane) -> None:
    for kind, _, _ in HOOKS.values():
        plane.api.delete(f"{CONFIGURATIONS}/{kind.lower()}s/{NAME}")
    plane.kill(NAME)


def _hook(verb: str, operations: list[str], resource: tuple[str, str, str], port: int, bundle: str) -> dict[str, Any]:
    group, version, kind = resource
    path = f"{verb}-{group.replace('.', '-')}-{version}-{kind}"
    return {
        "name": f"{verb[0]}{kind}.kb.io",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "clientConfig": {"url": f"https://127.0.0.1:{port}/{path}", "caBundle": bundle},
        "rules": [
            {"apiGroups": [group], "apiVersions": [version], "resources": [f"{kind}s"], "operations": operations}
        ],
    }
