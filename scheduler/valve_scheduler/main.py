"""`valve-scheduler`: the extender beside kube-scheduler, the SLA controller, or the admission webhook."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from valve_kube.access import find
from valve_kube.client import KubeClient
from valve_kube.errors import SchedulerError
from valve_kube.options import PORT, SUBCOMMAND, option, seconds

from valve_scheduler.cli.check import check
from valve_scheduler.cli.drain import DrainSettings, drain
from valve_scheduler.controller.monitor import MonitorSettings
from valve_scheduler.controller.rounds import ControllerSettings, run_controller
from valve_scheduler.extender.service import ExtenderSettings, run_extender
from valve_scheduler.placement.rank import PlacementSettings
from valve_scheduler.webhook.admission import AdmissionSettings, Backend
from valve_scheduler.webhook.service import WebhookSettings, run_webhook

_STANDARD = set(vars(logging.makeLogRecord({})))


class JsonLines(logging.Formatter):
    """One JSON object a line: event name and what was bound to it."""

    def format(self, record: logging.LogRecord) -> str:
        bound = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        line = {"time": record.created, "level": record.levelname.lower(), "event": record.getMessage(), **bound}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)

        return json.dumps(line, default=str)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="valve-scheduler", description=__doc__)
    top.add_argument(
        "--kubeconfig", help="The kubeconfig to read. Default: the pod's service account, else the user's kubeconfig."
    )
    commands = top.add_subparsers(dest="command", required=True, parser_class=SUBCOMMAND)

    _add_extender(commands)
    _add_controller(commands)
    _add_webhook(commands)
    _add_drain(commands)
    commands.add_parser("check", help="Check that these rights can read what Valve follows.")

    return top


def _add_extender(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    extender = commands.add_parser("extender", help="Answer the filter, prioritize and bind calls of kube-scheduler.")
    option(extender, "--port", 8901, "Listen for kube-scheduler on this port of 127.0.0.1.", type=PORT)
    _add_probes(extender)
    _add_namespace(extender, "--lease-namespace", "kube-scheduler's lease")
    option(extender, "--lease-name", "valve-scheduler", "The name of kube-scheduler's lease.")
    extender.add_argument(
        "--no-leader-election",
        action="store_true",
        help="Answer without looking at a lease. Use it where only one scheduler runs and has no lease.",
    )
    _add_alignment(extender)


def _add_controller(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    controller = commands.add_parser(
        "controller", help="Watch SLAs, evict pods within a budget and requeue pending pods."
    )
    _add_alignment(controller)
    _add_namespace(controller, "--namespace", "the lease")
    _add_probes(controller)
    timed, settings = partial(option, controller, metavar="SECONDS", type=seconds), ControllerSettings()
    timed("--lease", settings.lease_s, "Another controller leads after this one was silent for this many seconds.")
    timed("--monitor-every", settings.monitor_every_s, "Look at the SLAs every so many seconds.")
    timed("--sla-window", settings.monitor.window_s, "Judge an SLA over this many seconds.")
    stuck = "Move a pod that cannot run where it was placed after this many seconds."
    timed("--stuck-after", settings.patience_s, stuck)


def _add_webhook(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    webhook = commands.add_parser("webhook", help="Make offline pods schedulable and inject the shim into online pods.")
    option(webhook, "--port", 8443, "Listen for the API server on this port.", type=PORT)
    option(webhook, "--host", "0.0.0.0", "Listen for the API server on this address.")
    _add_probes(webhook)
    _add_namespace(webhook, "--namespace", "the secret")
    option(webhook, "--secret", "valve-webhook-tls", "The secret that holds the webhook's own certificate.")
    option(
        webhook, "--configuration", "valve", "The MutatingWebhookConfiguration whose CA the webhook keeps up to date."
    )
    webhook.add_argument(
        "--hostname", action="append", help="A name in the certificate. Repeat the option for several names."
    )
    webhook.add_argument(
        "--certificate-folder",
        type=Path,
        help="The folder with tls.crt and tls.key from cert-manager. Default: the webhook makes its own certificate.",
    )
    option(
        webhook,
        "--backend",
        Backend.ENVVAR.value,
        "How an offline pod asks for a GPU.",
        choices=[b.value for b in Backend],
    )
    option(webhook, "--runtime-class", AdmissionSettings().runtime_class, "The RuntimeClass that offline pods get.")
    option(webhook, "--shim-folder", AdmissionSettings().shim_folder, "The folder of the shim on the nodes.")
    option(
        webhook, "--client-folder", AdmissionSettings().client_folder, "The folder of the link's client on the nodes."
    )
    webhook.add_argument(
        "--offline-env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="A variable that offline pods get. Repeat the option for several variables.",
    )


def _add_drain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    before = commands.add_parser(
        "drain",
        help="Prepare an uninstall: remove the webhooks, switch the nodes off and wait until no offline pod is left.",
    )
    option(before, "--configuration", "valve", "The MutatingWebhookConfiguration to remove.")
    option(before, "--timeout", DrainSettings().timeout_s, "Give up after this many seconds.", metavar="SECONDS")


def _add_namespace(parser: argparse.ArgumentParser, name: str, what: str) -> None:
    default = os.environ.get("POD_NAMESPACE", "valve-system")
    text = f"The namespace of {what}. Default: POD_NAMESPACE of the environment, else valve-system."
    parser.add_argument(name, default=default, help=text)


def _add_probes(parser: argparse.ArgumentParser) -> None:
    option(parser, "--probe-host", "0.0.0.0", "Serve probes and metrics on this address.")
    option(parser, "--probe-port", 8902, "Serve /healthz, /readyz and /metrics on this port.", type=PORT)


def _add_alignment(parser: argparse.ArgumentParser) -> None:
    theta = PlacementSettings().theta
    parser.add_argument(
        "--alignment-threshold",
        type=float,
        default=theta,
        help="Two GPUs never serve one job when their busy time overlaps less than this share (theta, 0 to 1). "
        "Default: %(default)g.",
    )


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    client = KubeClient(find(dict(os.environ), options.kubeconfig))
    try:
        asyncio.run(_until_signal(client, _service(client, options)))
    except SchedulerError as error:
        print(f"valve-scheduler {options.command}: {error}", file=sys.stderr)
        return 1

    return 0


def _service(client: KubeClient, options: argparse.Namespace) -> Coroutine[Any, Any, None]:
    if options.command == "controller":
        watching = ControllerSettings(
            namespace=options.namespace,
            probe_host=options.probe_host,
            probe_port=options.probe_port,
            lease_s=options.lease,
            monitor_every_s=options.monitor_every,
            patience_s=options.stuck_after,
            monitor=MonitorSettings(window_s=options.sla_window),
            placement=PlacementSettings(theta=options.alignment_threshold),
        )
        return run_controller(client, watching, f"{socket.gethostname()}_{uuid.uuid4()}")
    if options.command == "check":
        return check(client)
    if options.command == "drain":
        return drain(client, DrainSettings(configuration=options.configuration, timeout_s=options.timeout))
    if options.command == "webhook":
        return run_webhook(client, _webhook_settings(options))
    settings = ExtenderSettings(
        port=options.port,
        probe_host=options.probe_host,
        probe_port=options.probe_port,
        hostname="" if options.no_leader_election else socket.gethostname(),
        lease_namespace=options.lease_namespace,
        lease_name=options.lease_name,
        placement=PlacementSettings(theta=options.alignment_threshold),
    )
    return run_extender(client, settings)


def _webhook_settings(options: argparse.Namespace) -> WebhookSettings:
    admission = AdmissionSettings(
        backend=Backend(options.backend),
        runtime_class=options.runtime_class,
        version=importlib.metadata.version("valve"),
        shim_folder=options.shim_folder,
        client_folder=options.client_folder,
        offline_env=dict(entry.split("=", 1) for entry in options.offline_env),
    )
    return WebhookSettings(
        port=options.port,
        host=options.host,
        probe_host=options.probe_host,
        probe_port=options.probe_port,
        namespace=options.namespace,
        secret=options.secret,
        configuration=options.configuration,
        hosts=tuple(options.hostname or [f"valve-webhook.{options.namespace}.svc"]),
        certificate_folder=options.certificate_folder,
        admission=admission,
    )


async def _until_signal(client: KubeClient, service: Coroutine[Any, Any, None]) -> None:
    """SIGTERM and SIGINT end the service in order.

    Requests under way are given up, kube-scheduler asks again.
    """
    task = asyncio.ensure_future(service)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.closing(client), contextlib.suppress(asyncio.CancelledError):
        await task


if __name__ == "__main__":
    sys.exit(main())
