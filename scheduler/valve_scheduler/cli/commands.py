"""`valve cluster`: what the fleet offers and what became of it, why a pod waits, and the brake. Decides nothing."""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import yaml
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from valve_kube import names
from valve_kube.access import find
from valve_kube.client import ApiError, Json, KubeClient
from valve_kube.errors import SchedulerError
from valve_kube.options import SUBCOMMAND, option, whole

from valve_scheduler.cli import reporting
from valve_scheduler.cli.coverage import coverage
from valve_scheduler.cli.measuring import PATTERN, measure, profile_of
from valve_scheduler.cli.overview import (
    Row,
    by_namespace,
    fleet_row,
    fleet_text,
    node_row,
    pod_rows,
    usage_rows,
    workload_row,
)
from valve_scheduler.cli.pause import pause, resume
from valve_scheduler.controller import profiling
from valve_scheduler.placement.explain import PodExplanation, explain
from valve_scheduler.placement.rank import PlacementSettings
from valve_scheduler.placement.state import ClusterState
from valve_scheduler.placement.views import (
    OFFLINE_PODS,
    grounds_view,
    nodes_view,
    pods_view,
    policies_view,
    profiles_view,
    workloads_view,
)

OK, FAILED = 0, 1
_NODES = f"{names.API_PATH}/gpuharvestnodes"
# What a person reads instead of a table without rows.
_EMPTY = {
    "nodes": "No node has reported: is the daemon running on nodes with GPUs?",
    "workloads": "No offline job with an SLA has run yet.",
    "pods": "There is no offline pod.",
    "usage": "No namespace has an account yet: one is opened when its first pod has harvested or lent GPU time.",
}


def main(argv: list[str], program: str = "valve cluster") -> int:
    own, command = _split(argv)
    options = _parser(program).parse_args(own)
    options.workload = command
    try:
        shown = asyncio.run(_show(options))
    except SchedulerError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return OK
    if options.json:
        print(json.dumps(shown))

    return FAILED if options.command == "coverage" and shown["losing"] else OK


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and the command after --, whose options are not for us."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end + 1 :]


async def _show(options: argparse.Namespace) -> Json:
    if options.command == "measure" and not options.store:
        return await _measure(None, options)
    access = find(dict(os.environ), options.kubeconfig, options.context)
    options.home = access.namespace
    with contextlib.closing(KubeClient(access)) as client:
        return await _SHOW[options.command](client, options)


def _parser(program: str) -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--kubeconfig", help="The kubeconfig to read. Default: the service account, else your own.")
    common.add_argument("--context", help="The context of the kubeconfig. Default: its current one.")
    common.add_argument("--json", action="store_true", help="Print one JSON document.")
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=SUBCOMMAND)

    def add(name: str, told: str, epilog: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(name, parents=[common], help=told, epilog=epilog)

    add(
        "status",
        "Show what each node offers, what harvesting is or would be worth, and what owners were promised and got.",
    )
    top = add("top", "Show the same live, with every offline pod.")
    option(top, "--every", 2.0, "Refresh after this many seconds.", metavar="SECONDS")
    top.add_argument("--once", action="store_true", help="Print one look and end.")
    why = add("explain", "Say why a pod is where it is, or nowhere.")
    why.add_argument(
        "pod", metavar="[NAMESPACE/]POD", help="The pod to explain. Without NAMESPACE it is looked for in --namespace."
    )
    why.add_argument("-n", "--namespace", default="", help="The namespace of the pod. Default: the kubeconfig's.")
    stop = add("pause", "Stop all harvesting in the cluster until resume.")
    option(
        stop,
        "--wait",
        5.0,
        "Wait this many seconds until the daemons confirm. 0 stands for no wait.",
        metavar="SECONDS",
    )
    add("resume", "End the pause.")
    usage = add("usage", "Show what each namespace, owner or service harvested, saved, lost and lent.")
    option(usage, "--by", "namespace", "Add the figures up by this.", choices=["namespace", "owner", "service"])
    reporting.add_options(
        add(
            "report",
            "Make one page of a week of observing: what harvesting would save, and which services would pay for it.",
        )
    )
    cover = add(
        "coverage", "List, before an upgrade, online pods that have no shim or one that the new version does not serve."
    )
    cover.add_argument(
        "--oldest-shim",
        default="",
        metavar="VERSION",
        help="The oldest shim that the new release serves, as its notes name it. Default: no shim is too old.",
    )
    _add_profiling(add)

    return parser


def _add_profiling(add: Callable[..., argparse.ArgumentParser]) -> None:
    profile = add("profile", "Store a throughput curve that you bring in a file.")
    profile.add_argument(
        "--from", dest="file", type=Path, required=True, metavar="FILE", help="The OfflineProfile, as a YAML file."
    )
    profile.add_argument(
        "-n",
        "--namespace",
        default="",
        help="The namespace of the profile. Default: the one in the file, else the kubeconfig's.",
    )
    runs = add(
        "measure",
        "Run the workload after -- at several memory limits and print its profile.",
        "Then -- and the workload's own benchmark. {mib} in it becomes the limit, {share} its share of the card.",
    )
    runs.add_argument("name", metavar="NAME", help="The name of the OfflineProfile.")
    runs.add_argument(
        "--limits",
        required=True,
        metavar="MIB,MIB,...",
        help="The limits of GPU memory to measure at, in MiB. The largest is the whole card.",
    )
    runs.add_argument(
        "-n", "--namespace", default="", help="The namespace in which the profile is stored. Default: the kubeconfig's."
    )
    runs.add_argument(
        "--gpu-model", default="", help="The card as nodes report it, such as H100 80GB HBM3. Default: any card."
    )
    option(runs, "--tensor-parallel", 1, "The number of GPUs that the workload runs on.", metavar="GPUS", type=whole(1))
    option(
        runs, "--pattern", PATTERN, "The regular expression that finds tokens per second in what the command prints."
    )
    runs.add_argument(
        "--store",
        action="store_true",
        help="Store the profile in the cluster as Ready. Without it the profile is only printed.",
    )


async def _status(client: KubeClient, options: argparse.Namespace) -> Json:
    shown = await _looked(client)
    if not options.json:
        _console().print(_rendered(shown, ("nodes", "workloads")))

    return shown


async def _looked(client: KubeClient) -> Json:
    now_s = time.time()
    nodes, _ = await client.list(_NODES)
    workloads, _ = await client.list(f"{names.API_PATH}/offlineworkloads")
    rows = [node_row(node, now_s) for node in nodes]
    fleet = fleet_row(rows)

    return {
        "fleet": fleet | {"text": fleet_text(fleet)},
        "nodes": rows,
        "workloads": list(map(workload_row, workloads)),
    }


async def _top(client: KubeClient, options: argparse.Namespace) -> Json:
    async def look() -> Json:
        pods, _ = await client.list("/api/v1/pods", OFFLINE_PODS)
        nodes, _ = await client.list(_NODES)
        return await _looked(client) | {"pods": pod_rows(pods, nodes)}

    shown = await look()
    if options.json:
        return shown
    parts = ("nodes", "pods", "workloads")
    if options.once or not sys.stdout.isatty():
        _console().print(_rendered(shown, parts))
        return shown
    with Live(_rendered(shown, parts), screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(options.every)
            live.update(_rendered(await look(), parts), refresh=True)


async def _explain(client: KubeClient, options: argparse.Namespace) -> Json:
    namespace, _, name = options.pod.rpartition("/")
    namespace = namespace or options.namespace or options.home
    pod = await client.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
    reports, _ = await client.list(_NODES)
    achieved = (
        next(row for row in pod_rows([pod], reports)) if (pod.get("status") or {}).get("phase") == "Running" else {}
    )
    found = explain(await _cluster(client), pod, time.time())
    if not options.json:
        _print_explanation(found, achieved)

    return asdict(found) | {"achieved": achieved}


async def _pause(client: KubeClient, options: argparse.Namespace) -> Json:
    done = await pause(client, wait_s=options.wait)
    if not options.json:
        print(f"paused: {done.confirmed} of {done.nodes} nodes do not harvest, after {done.took_s:.1f} s")

    return asdict(done)


async def _resume(client: KubeClient, options: argparse.Namespace) -> Json:
    lifted = await resume(client)
    if not options.json:
        print("resumed: every node follows its mode again" if lifted else "there was no pause to end")

    return {"lifted": lifted}


async def _usage(client: KubeClient, options: argparse.Namespace) -> Json:
    accounts, _ = await client.list(f"{names.API_PATH}/harvestaccounts")
    shown = {f"{options.by}s": [row for account in by_namespace(accounts) for row in usage_rows(account, options.by)]}
    if not options.json:
        _console().print(_table("usage", shown[f"{options.by}s"]))

    return shown


async def _coverage(client: KubeClient, options: argparse.Namespace) -> Json:
    pods, _ = await client.list("/api/v1/pods")
    found = coverage(pods, options.oldest_shim)
    if not options.json:
        losing = [asdict(pod) for pod in found if not pod.covered]
        _console().print(_table(f"{len(losing)} of {len(found)} online pods are not or will not be covered", losing))

    return {"losing": [asdict(pod) for pod in found if not pod.covered], "online": len(found)}


async def _profile(client: KubeClient, options: argparse.Namespace) -> Json:
    stored = await profiling.store_by_hand(
        client, options.file.read_text(encoding="utf-8"), options.namespace, options.home
    )
    if not options.json:
        print(f"OfflineProfile {stored['metadata']['namespace']}/{stored['metadata']['name']} is Ready")

    return stored


async def _measure(client: KubeClient | None, options: argparse.Namespace) -> Json:
    try:
        limits = [float(text) for text in options.limits.split(",")]
    except ValueError as error:
        raise SchedulerError(f"--limits is {options.limits!r}, must be MiB separated by commas") from error
    if not options.workload:
        raise SchedulerError("no command: valve cluster measure NAME --limits 20000,40000 -- COMMAND {mib}")
    runs = await measure(options.workload, limits, options.pattern)
    workload = {"model": options.name, "gpuModel": options.gpu_model, "tensorParallel": options.tensor_parallel}
    namespace = options.namespace or (options.home if client is not None else "default")
    profile = profile_of(options.name, namespace, runs, workload)
    if client is not None:
        status = {"phase": "Ready", "source": "Manual", "samples": len(profile["spec"]["curve"])}
        await profiling.store(client, profile["metadata"], profile["spec"], status)
    if not options.json:
        print(yaml.safe_dump(profile, sort_keys=False), end="")

    return profile


async def _cluster(client: KubeClient) -> ClusterState:
    """The extender's state, from one list of each kind."""
    state = ClusterState(PlacementSettings())
    views = [
        nodes_view(client, state, time.time),
        pods_view(client, state),
        profiles_view(client, state),
        workloads_view(client, state),
        policies_view(client, state),
    ]
    for view in views:
        items, _ = await view.listed()
        view.sink.replace(items)
    nodes = grounds_view(client, state.asked.grounds)
    with contextlib.suppress(ApiError):  # a user who may not read nodes is told all the rest
        nodes.sink.replace((await nodes.listed())[0])

    return state


def _print_explanation(found: PodExplanation, achieved: Row) -> None:
    console = _console()
    console.print(f"[bold]{found.pod}[/] is {found.state}" + (f" on {found.node}" if found.node else ""))
    if found.gpus:
        console.print(f"  GPUs {', '.join(found.gpus)}; predicted share of standalone {found.predicted or 'unknown'}")
    if achieved:
        tokens = achieved["tokens_per_s"]
        rate = "reports no tokens (no engine hook)" if tokens is None else f"{tokens} tokens/s"
        console.print(f"  harvested {achieved['harvest_s']} GPU-seconds so far; {rate}")
    for node, share in found.candidates:
        console.print(f"  {share:5.2f}  {node}")
    for idle in found.windows:
        shares = (idle.recent, idle.hour, idle.day)
        recent, hour, day = ("unknown" if share is None else f"{share:.2f}" for share in shares)
        told = f"  {idle.node}: idle share of the last ten minutes {recent}, hour {hour}, day {day}"
        console.print(f"{told}; {idle.history}" if idle.history else told)
    for refusal in found.refusals:
        console.print(f"  {refusal.nodes:5d}  {refusal.text}, e.g. {', '.join(refusal.examples)}")
    if found.advice:
        console.print(f"  {found.advice}")


def _console() -> Console:
    """A pipe has no width: there names are worth more than eighty columns."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 220)


def _rendered(shown: Json, parts: tuple[str, ...]) -> RenderableType:
    return Group(shown["fleet"]["text"], *(_table(part, shown[part]) for part in parts))


def _table(title: str, rows: list[Row]) -> RenderableType:
    if not rows:
        return _EMPTY.get(title, f"{title}.")
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))

    return table


_SHOW: dict[str, Callable[[KubeClient, argparse.Namespace], Awaitable[Json]]] = {
    "status": _status,
    "top": _top,
    "explain": _explain,
    "pause": _pause,
    "resume": _resume,
    "usage": _usage,
    "coverage": _coverage,
    "profile": _profile,
    "report": reporting.report,
    "measure": _measure,
}
