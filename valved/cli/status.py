"""`valve status`: what this node's valved knows, once."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.json_format import MessageToJson
from rich.console import Group, RenderableType
from rich.text import Text
from valve.v1 import node_pb2

from valved.cli import remap, words
from valved.cli.client import node
from valved.cli.exits import OK
from valved.cli.tables import FittingTable, Paper

MOST_PIDS = 20
MOST_NAMED = 5


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("status", help="Show the GPUs, services and clients of this node.")
    parser.add_argument("--json", action="store_true", help="Print the whole status as JSON.")
    parser.set_defaults(run=status)


def status(options: argparse.Namespace) -> int:
    with node() as connection:
        answer = connection.status()
    if options.json:
        print(MessageToJson(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
    else:
        show(answer)
    return OK


def show(answer: Any) -> None:
    Paper().print(render(answer))


def render(answer: Any) -> RenderableType:
    return Group(head(answer), gpus(answer), services(answer), *memory(answer), *notes(answer))


def head(answer: Any) -> Text:
    driver = answer.driver
    known = "" if driver.known else " (unknown branch: observing only)"
    text = Text.assemble(
        ("valved ", "bold"), f"{answer.version}, pid {answer.pid}, mode ", (words.mode(answer), "bold"), "\n"
    )
    lock = f", {words.lock(driver)}" if len(answer.gpus) > 1 else ""
    text.append(f"driver {driver.version}{known}{lock}\n" if driver.version else "no driver found (observing only)\n")
    if answer.mode == node_pb2.MODE_OBSERVE:
        text.append(observed(answer))
    return text


def idle_share(service: Any) -> float:
    """How much of its life a service left its GPUs; valved looks for it while it observes, or has offline work."""
    return float(service.idle_ns / max(1, service.idle_ns + service.busy_ns))


def observed(answer: Any) -> str:
    """What harvesting would give: on each GPU the idle share of the busiest of its services."""
    online = [service for service in answer.services if service.role == node_pb2.ROLE_ONLINE and service.gpus]
    if not online:
        return "observing: no online service uses a GPU yet (valve run --online -- CMD)\n"
    gpus = {gpu for service in online for gpu in service.gpus}
    worth = sum(min(idle_share(service) for service in online if gpu in service.gpus) for gpu in gpus)
    each = ", ".join(
        f"{service.name} was idle {idle_share(service):.0%} of {words.duration(service.idle_ns + service.busy_ns)}"
        for service in online
    )
    return f"observing: {each}; harvesting would give about {worth:.1f} of a GPU\n"


def gpu_state(gpu: Any) -> Text:
    """What offline work may do on this GPU now."""
    if gpu.guarded_because:
        return Text("guarded", style="yellow")
    if not gpu.channels:
        return Text("none here")
    state = ("stopped", "yellow") if gpu.gated else ("may run", "green")
    return Text.assemble(state, f" ({gpu.channels} ch)")


def no_gpus() -> Text:
    return Text("GPUs: valved found none; valve doctor says why\n", style="yellow")


def gpus(answer: Any) -> RenderableType:
    if not answer.gpus:
        return no_gpus()
    columns = ("gpu", "offline work", "reached by", "stops", "p50", "p99", "harvested")
    table = FittingTable("GPUs", columns, spare=("p50", "reached by", "p99", "stops"))
    for gpu in answer.gpus:
        latency = [words.at_most(gpu.preempt_latency, q) for q in (0.5, 0.99)]
        harvested = words.duration(gpu.harvest_ns)
        state = gpu_state(gpu)
        table.add_row(str(gpu.index), state, gpu.reach, str(gpu.preemptions), *latency, harvested)
    return table


SPARE = ("pids", "delay", "gpus", "harvested", "stops", "role", "id")  # `valve explain ID` asks for the last


def services(answer: Any) -> RenderableType:
    columns = ("id", "name", "role", "gpus", "stops", "delay", "harvested", "pids", "state")
    table = FittingTable("Services", columns, spare=SPARE, sentence="state")
    if not answer.services:
        return Text("Services: none here (valve run --online -- CMD)\n")
    for service in answer.services:
        online = service.role == node_pb2.ROLE_ONLINE
        most = f" (most {service.max_preemptions_per_request} a request)" if service.hinted else ""
        table.add_row(
            str(service.id),
            words.short(service.name),
            words.role(service.role),
            ",".join(map(str, service.gpus)),
            f"{service.preemptions}{most}" if online else "-",
            words.duration(service.delay_ns) if online else "-",
            "-" if online else words.duration(service.harvest_ns),
            ",".join(map(str, service.pids)),
            service.state,
        )
    return table


def memory(answer: Any) -> list[RenderableType]:
    """The pool of each GPU and what each engine has of it; nothing where no engine shares memory."""
    kv = answer.memory
    if not any(gpu.handles for gpu in kv.gpus) and not kv.engines:
        return []
    size = kv.handle_bytes
    line = Text(
        f"KV memory: {kv.remap}, {kv.reclaims} reclaims of {words.gib(kv.reclaimed_bytes)} in all"
        f" ({kv.reclaims_short} short), target {kv.target_per_hour:g} an hour,"
        f" {kv.lost_tokens} tokens computed again\n"
    )
    pools = FittingTable(
        "KV pool", ("gpu", "pool", "online", "offline", "free", "moving", "orphaned"), spare=("orphaned", "moving")
    )
    for gpu in kv.gpus:
        parts = (gpu.handles, gpu.online, gpu.offline, gpu.free, gpu.moving, gpu.orphaned)
        pools.add_row(str(gpu.index), *(words.gib(part * size) for part in parts))
    columns = ("service", "engine", "role", "blocks", "used", "wants", "headroom", "per hour", "state")
    engines = FittingTable(
        "Engines", columns, spare=("per hour", "wants", "headroom", "service", "role", "used"), sentence="state"
    )
    for engine in kv.engines:
        online = engine.role == node_pb2.ROLE_ONLINE
        engines.add_row(
            str(engine.service),
            words.short(engine.name),
            words.role(engine.role),
            f"{engine.backed_blocks} of {engine.blocks}",
            str(engine.used_blocks),
            str(engine.wanted_blocks),
            words.gib(engine.headroom_columns * engine.column_bytes) if online else "-",
            f"{engine.reclaims_per_hour:g}" if online else "-",
            engine.state,
        )
    totals = next((phase.latency for phase in kv.phases if phase.name == "total"), None)
    if totals is not None and sum(totals.count):
        found = [words.at_most(totals, q) for q in (0.5, 0.99)]
        line.append(f"a reclaim took p50 {found[0]}, p99 {found[1]}\n")
    for one in remap.lines(kv):
        line.append(f"{one}\n")
    return [line, pools, engines]


def granted(offer: Any) -> list[str]:
    """What is offered and came of it; what granting would give, as long as it gives nothing."""
    worth = f"granting is {offer.worth}" if offer.worth and not offer.grants else ""
    return list(filter(None, [offer.words, worth]))


def client_notes(clients: Iterable[Any]) -> Iterator[str]:
    """What is to be said of many is said once."""
    those: dict[str, list[str]] = {}
    for client in clients:
        for note in client.notes:
            those.setdefault(note, []).append(f"{client.pid} ({client.comm})")
    for note, names in those.items():
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        yield f"client{'s' if names[1:] else ''} {', '.join(names[:MOST_NAMED])}{more}: {note}"


def notes(answer: Any) -> list[Text]:
    """What an operator should know: one line for each client's notes and each GPU that is not at its best rung."""
    lines = list(client_notes(answer.clients))
    connected = {pid for service in answer.services for pid in service.pids}
    if others := sorted({*answer.offline_pids} - connected):
        more = ", ..." if len(others) > MOST_PIDS else ""
        lines.append(f"offline and not connected: process {', '.join(map(str, others[:MOST_PIDS]))}{more}")
    lines += [
        f"service {service.id} ({service.name}) {'; '.join(granted(service.granted))}"
        for service in answer.services
        if service.granted.words or service.granted.HasField("worth_points")
    ]
    lines += [f"gpu {gpu.index}: {gpu.reach_reason}" for gpu in answer.gpus if gpu.reach_reason and gpu.channels]
    lines += [
        f"gpu {gpu.index}: offline work leaves {words.gib(gpu.kept_bytes)} of its memory free for online services"
        for gpu in answer.gpus
        if gpu.kept_bytes
    ]
    lines += [f"gpu {gpu.index} is not harvested: {gpu.guarded_because}" for gpu in answer.gpus if gpu.guarded_because]
    lines += [f"valved cannot write {one.path}: {one.error}: {one.loss}" for one in answer.unwritten]
    lines += answer.troubles
    lines += [answer.lack] if answer.lack else []
    if not lines:
        return []
    return [Text("\n".join(["Notes", *(f"  {line}" for line in lines)]), style="yellow")]
