"""Kueue's own controller beside the control plane, as a process on loopback: its queues, quota and preemption, real.

Its webhooks are not configured: they would set a Job to be suspended, which whoever makes one here does himself.
"""

from __future__ import annotations

import datetime
import json
import urllib.request
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from valve_tools.cluster.controlplane import ControlPlane, free_port, wait_for

NAMESPACE = "kueue-system"
# It reads this one path whatever its configuration says: it sees a copy of /etc that has the folder.
START = 'cp -a /etc "$0/etc" && mkdir -p "$0/etc/kueue/metrics" && cp -a "$0/certs" "$0/etc/kueue/metrics/certs" && \
mount --bind "$0/etc" /etc && exec "$@"'


def start_kueue(plane: ControlPlane) -> None:
    """Returns when it is ready; needs root for its view of /etc."""
    folder, health = plane.folder / "kueue", free_port()
    certificates = folder / "certs"
    certificates.mkdir(parents=True)
    _write_certificate(certificates)
    configuration = folder / "configuration.json"
    configuration.write_text(json.dumps(_configuration(certificates, health)))
    plane.api.post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    program = [str(plane.programs / "kueue"), f"--config={configuration}", "--feature-gates=VisibilityOnDemand=false"]
    plane.spawn(
        "kueue",
        *("--mount", "sh", "-c", START, str(folder), *program),
        program="unshare",
        environment={"KUBECONFIG": str(plane.kubeconfig)},
    )
    wait_for("kueue", lambda: urllib.request.urlopen(f"http://127.0.0.1:{health}/readyz"), 120)


def _configuration(certificates: Path, health: int) -> dict[str, object]:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": f"127.0.0.1:{free_port()}"},
        "webhook": {"host": "127.0.0.1", "port": free_port(), "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": ["batch/job"]},
    }


def _write_certificate(folder: Path) -> None:
    """For servers that nobody calls here and that it will not start without."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kueue")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    (folder / "tls.crt").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    (folder / "tls.key").write_bytes(key.private_bytes(*plain))
