"""`valve route`: start the router, watch it, drain a replica."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from valve_kube.access import find
from valve_kube.errors import SchedulerError
from valve_kube.options import SUBCOMMAND, option

from valve_router.plan.active import ActiveSettings
from valve_router.plan.score import Score, ScoreSettings
from valve_router.settings import PASSED, RouterSettings, service_of

USAGE = 2
FAILED = 1
HERE = "http://127.0.0.1:8100"


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, OSError) as error:
        print(f"valve route: {error}", file=sys.stderr)
        return USAGE if isinstance(error, ValueError) else FAILED


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="valve route", description=__doc__)
    commands = root.add_subparsers(required=True, metavar="COMMAND", parser_class=SUBCOMMAND)
    _add_serve(commands)
    _add_pick(commands)
    for name, run, text in (
        ("status", _status, "Show a running router once."),
        ("top", _top, "Show a running router until Ctrl-C."),
    ):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        _add_target(command)
        if name == "status":
            command.add_argument("--json", action="store_true", help="Print the status as one JSON document.")
    for name, text in (
        ("drain", "Send a replica no more requests."),
        ("undrain", "Send a drained replica requests again."),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("replica", help="The replica, by its number or its URL.")
        command.set_defaults(run=_drain, is_drained=name == "drain")
        _add_target(command)
    return root


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve", help="Run the router: pass OpenAI-shaped requests to the replicas of one model."
    )
    _add_choice(serve)
    serve.add_argument(
        "--token-file",
        type=Path,
        help="Clients must send the content of this file as a bearer token. Default: no token is asked for.",
    )
    serve.add_argument(
        "--path",
        action="append",
        default=[],
        help="Clients may also ask this path of the engine. Repeat the option for several paths.",
    )
    serve.add_argument(
        "--training",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="Take fleet finetuning jobs and keep them in this folder. Default: take none.",
    )
    option(
        serve,
        "--training-age-s",
        60.0,
        "A micro-batch that was queued for this many seconds no longer waits for requests.",
        metavar="S",
    )
    serve.add_argument(
        "--newest",
        action="append",
        default=[],
        metavar="NAME",
        help="Clients may ask for the newest version NAME-vN by the name NAME. Repeat the option for several names.",
    )
    serve.add_argument("--access-log", action="store_true", help="Print one JSON line on stdout for each request.")
    serve.set_defaults(run=_serve)


def _add_pick(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    pick = commands.add_parser(
        "pick", help="Choose replicas for an Envoy gateway. The gateway passes the requests itself."
    )
    _add_choice(pick)
    option(pick, "--grpc", "127.0.0.1:9002", "Gateways connect to this address.", metavar="HOST:PORT")
    pick.add_argument(
        "--tls-certificate",
        type=Path,
        help="The certificate that gateways are shown, as a PEM file. It needs --tls-key.",
    )
    pick.add_argument("--tls-key", type=Path, help="The private key of --tls-certificate, as a PEM file.")
    pick.add_argument("--client-ca", type=Path, help="Only gateways with a certificate of this authority may connect.")
    pick.add_argument(
        "--tls-self-signed", action="store_true", help="Make a certificate at the start. Gateways cannot check it."
    )
    option(
        pick,
        "--health-port",
        0,
        "Answer the kubelet's health checks on this port, without TLS. 0 means: no such port.",
    )
    pick.add_argument(
        "--without-tls",
        action="store_true",
        help="Serve without TLS. Use it only where a network policy lets only gateways in.",
    )
    pick.set_defaults(run=_pick, token_file=None, path=[], newest=[], training=Path(), training_age_s=60.0)


def _add_choice(command: argparse.ArgumentParser) -> None:
    """Which replicas there are, and how one is chosen."""
    command.add_argument(
        "--replica",
        action="append",
        default=[],
        metavar="URL",
        help="The URL of one engine. Repeat the option for each replica.",
    )
    command.add_argument(
        "--service",
        metavar="NAMESPACE/NAME[:PORT]",
        help="Use the ready pods of this Service in place of --replica. PORT is a name, or a number in the pods "
        "(targetPort).",
    )
    command.add_argument(
        "--replica-token-file",
        type=Path,
        help="The content of this file is sent to the replicas as a bearer token. Default: none is sent.",
    )
    command.add_argument(
        "--kubeconfig",
        help="The kubeconfig for --service. Default: the pod's service account, else the user's kubeconfig.",
    )
    option(command, "--listen", "127.0.0.1:8100", "Clients connect to this address.", metavar="HOST:PORT")
    command.add_argument(
        "--operator-token-file",
        type=Path,
        help="Requests for status, metrics and drain must send the content of this file as a token. It is needed where "
        "others can connect.",
    )
    option(
        command,
        "--score",
        Score.PACK.value,
        "How a replica is chosen: the paper's printed score, the least cost, or packed replicas.",
        choices=[one.value for one in Score],
    )
    option(
        command,
        "--tpot-ms",
        0.0,
        "A replica that takes longer for a token gets no more requests, in milliseconds. 0 stands for no limit.",
    )
    option(
        command,
        "--kv-tokens",
        0,
        "The number of tokens that the KV memory of one replica holds. 0 stands for not known.",
        metavar="N",
    )
    option(command, "--open-per-replica", 256, "The most requests that may be under way in one replica.")
    option(command, "--least-replicas", 1, "The advice never asks for fewer awake replicas than this number.")


def _add_target(command: argparse.ArgumentParser) -> None:
    option(command, "--router", HERE, "The URL of the running router.", metavar="URL")
    command.add_argument(
        "--token-file", type=Path, help="The file that holds the router's operator token. Default: send none."
    )


def address_of(flag: str, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{flag} {text}: not HOST:PORT")
    return host.strip("[]"), int(port)


def settings_of(arguments: argparse.Namespace) -> RouterSettings:
    host, port = address_of("--listen", arguments.listen)
    if not 0 <= arguments.tpot_ms < 3_600_000:
        raise ValueError(f"--tpot-ms {arguments.tpot_ms}: must be 0 or more, and below an hour")
    score = replace(ScoreSettings(), score=Score(arguments.score))
    return RouterSettings(
        replicas=tuple(arguments.replica),
        service=service_of(arguments.service) if arguments.service else None,
        host=host,
        port=port,
        token=_token(arguments.token_file),
        operator_token=_token(arguments.operator_token_file),
        paths=(*PASSED, *arguments.path),
        replica_token=_token(arguments.replica_token_file),
        newest=tuple(arguments.newest),
        open_per_replica=arguments.open_per_replica,
        training_folder=str(arguments.training) if arguments.training != Path() else "",
        training_age_s=arguments.training_age_s,
        kv_tokens=arguments.kv_tokens,
        tpot_target_s=arguments.tpot_ms / 1e3,
        score=score,
        active=ActiveSettings(floor=arguments.least_replicas),
    )


def _token(path: Path | None) -> str:
    if path is None:
        return ""
    token = path.read_text().strip()
    if not token or any(character.isspace() for character in token):
        raise ValueError(f"{path}: the token must be one word without spaces")
    return token


def _serve(arguments: argparse.Namespace) -> int:
    try:
        from valve_router.server import serve
    except ImportError as error:
        print(f"valve route: {error}; in a checkout of Valve: pip install '.[router]'", file=sys.stderr)
        return FAILED
    settings = settings_of(arguments)
    logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.WARNING)
    if arguments.access_log:
        logging.getLogger("valve_router.access").setLevel(logging.INFO)
    return _until_told(arguments, settings, serve, f"behind http://{settings.host}:{settings.port}")


def _pick(arguments: argparse.Namespace) -> int:
    try:
        from valve_router.picker import GatewayDoor, serve
    except ImportError as error:
        print(f"valve route: {error}; in a checkout of Valve: pip install '.[picker]'", file=sys.stderr)
        return FAILED
    host, port = address_of("--grpc", arguments.grpc)
    door = GatewayDoor(
        host=host,
        port=port,
        certificate=arguments.tls_certificate,
        key=arguments.tls_key,
        client_authority=arguments.client_ca,
        is_self_signed=arguments.tls_self_signed,
        health_port=arguments.health_port,
        is_open=arguments.without_tls,
    )
    arguments.token_file = arguments.operator_token_file  # no client ever asks there
    settings = settings_of(arguments)
    logging.basicConfig(format="%(message)s", stream=sys.stdout, level=logging.WARNING)
    return _until_told(arguments, settings, partial(serve, door=door), f"for gateways at {arguments.grpc}")


def _until_told(arguments: argparse.Namespace, settings: RouterSettings, serve: Any, where: str) -> int:
    """Serve until SIGTERM; say so once it does."""
    try:
        access = find(dict(os.environ), arguments.kubeconfig) if settings.service else None
    except SchedulerError as error:
        raise OSError(str(error)) from error

    async def run() -> None:
        stop, ready = asyncio.Event(), asyncio.Event()
        for one in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(one, stop.set)
        serving = asyncio.create_task(serve(settings, stop=stop, ready=ready, access=access))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if ready.is_set():
            count = len(settings.replicas)
            replicas = f"{count} replica{'' if count == 1 else 's'}"
            whose = f"the pods of service {arguments.service}" if settings.service else replicas
            print(f"valve route: {whose} {where}", flush=True)
        await serving

    asyncio.run(run())
    return 0


def _call(arguments: argparse.Namespace, path: str, body: Any = None) -> dict[str, Any]:
    request = urllib.request.Request(arguments.router.rstrip("/") + path)
    token = _token(arguments.token_file)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = f"it answers {error.code}"
        raise OSError(f"{arguments.router}: {text}") from None
    except urllib.error.URLError as error:
        why = getattr(error.reason, "strerror", None) or error.reason
        raise OSError(f"{arguments.router}: no router answers there ({why})") from None


def table_of(status: dict[str, Any]) -> Table:
    requests = status["requests"]
    answered = ", ".join(f"{count} x {code}" for code, count in requests.items()) or "none yet"
    title = f"requests: {answered}; tried again {status['retries']}, broken off {status['broken']}"
    if status["wanted"] is not None:
        title += f"; {status['wanted']} of {len(status['replicas'])} replicas would be enough"
    table = Table(title=title, title_justify="left")
    for name in ("replica", "state", "now", "served", "failed", "gap ms", "error"):
        table.add_column(name, justify="left" if name in ("replica", "state") else "right")
    for one in status["replicas"]:
        state = f"{one['state']}: {one['why_not']}" if one["why_not"] else one["state"]
        error = f"{one['prediction_error']:.0%}"
        cells = (one["under_way"], one["served"], one["failed"], one["gap_ms"], error)
        table.add_row(f"{one['name']} {one['url']}", state, *map(str, cells))
    return table


def _status(arguments: argparse.Namespace) -> int:
    status = _call(arguments, "/route/status")
    if arguments.json:
        print(json.dumps(status, indent=2))
    else:
        Console().print(table_of(status))
    return 0


def _top(arguments: argparse.Namespace) -> int:
    try:
        with Live(table_of(_call(arguments, "/route/status")), refresh_per_second=2) as live:
            while True:
                time.sleep(1)
                live.update(table_of(_call(arguments, "/route/status")))
    except KeyboardInterrupt:
        return 0


def _drain(arguments: argparse.Namespace) -> int:
    body = {"replica": arguments.replica, "is_drained": arguments.is_drained}
    Console().print(table_of(_call(arguments, "/route/drain", body)))
    return 0
