"""What the programs of a control plane are told: flags, configurations, keys, and how to reach its API server."""

import json
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from valve_tools.cluster.api import Json

# Services live in the block set aside for benchmarks (RFC 2544), which no host routes; the first is the API server's.
SERVICES, API_ADDRESS = "198.18.0.0/24", "198.18.0.1"


def scheduler(extender_port: int, election: Json, access: Path) -> Json:
    """As the chart tells kube-scheduler."""
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(access), "qps": 500, "burst": 1000},
        "leaderElection": election,
        "percentageOfNodesToScore": 100,
        "podInitialBackoffSeconds": 1,
        "podMaxBackoffSeconds": 30,
        "profiles": [{"schedulerName": "valve-scheduler"}],
        "extenders": [
            {
                "urlPrefix": f"http://127.0.0.1:{extender_port}/scheduler",
                "filterVerb": "filter",
                "prioritizeVerb": "prioritize",
                "bindVerb": "bind",
                "weight": 10,
                "nodeCacheCapable": True,
                "httpTimeout": "12s",
                "ignorable": False,
                "managedResources": [{"name": "valve.gpu/harvested-gpu", "ignoredByScheduler": False}],
            }
        ],
    }


def etcd(folder: Path, port: int, peers: int) -> list[str]:
    return [
        f"--data-dir={folder}/etcd",
        f"--listen-client-urls=http://127.0.0.1:{port}",
        f"--advertise-client-urls=http://127.0.0.1:{port}",
        f"--listen-peer-urls=http://127.0.0.1:{peers}",
        f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}",
        f"--initial-cluster=default=http://127.0.0.1:{peers}",
        "--unsafe-no-fsync",
        "--log-level=error",
    ]


def apiserver(folder: Path, port: int, etcd_port: int) -> list[str]:
    key = folder / "accounts.key"
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={folder}/apiserver",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--authorization-mode=RBAC",
        f"--token-auth-file={folder}/tokens.csv",
        "--endpoint-reconciler-type=none",
        "--allow-privileged",
        # On OpenShift it is on: a client that names an owner which must wait for the owned needs rights on the owner.
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
        f"--service-cluster-ip-range={SERVICES}",
        # Webhooks are called at their pods: no kube-proxy forwards the addresses of services here.
        "--enable-aggregator-routing",
    ]


def identity(folder: Path, token: str) -> None:
    """The key that service accounts are signed with, and the administrator's token."""
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    (folder / "accounts.key").write_bytes(pem)
    (folder / "tokens.csv").write_text(f"{token},administrator,1,system:masters\n")


def kubeconfig(path: Path, token: str, server: str) -> Path:
    configuration = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    path.write_text(json.dumps(configuration))

    return path
