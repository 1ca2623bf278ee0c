"""The webhook as a process on loopback, and the chart's configuration pointed at it."""

from __future__ import annotations

import sys

from valve_tools.cluster.controlplane import ControlPlane, free_port

CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/valve"


def start_webhook(plane: ControlPlane, *more: str) -> int:
    """With the rights of its service account; returns the port of its probes."""
    port, probes = free_port(), free_port()
    hooks = plane.api.get(CONFIGURATION)["webhooks"]
    for hook in hooks:
        path = hook["clientConfig"]["service"]["path"]
        hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}"}
    plane.api.patch(CONFIGURATION, {"webhooks": hooks})
    access = plane.account_kubeconfig("valve-system", "valve-webhook")
    flags = ["--host=127.0.0.1", f"--port={port}", "--probe-host=127.0.0.1", f"--probe-port={probes}"]
    flags += ["--namespace=valve-system", "--hostname=127.0.0.1", "--offline-env=ENGINE_TIMEOUT=86400", *more]
    command = ["-m", "valve_scheduler.main", f"--kubeconfig={access}", "webhook", *flags]
    plane.spawn("webhook", *command, program=sys.executable)

    return probes
